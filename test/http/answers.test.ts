import t from 'tap';
import { newWebhook } from '../helpers/deliveries.ts';
import { requestJson } from '../helpers/http.ts';
import { held, silence, startReceiver, status } from '../helpers/receiver.ts';
import { startWholeService } from '../helpers/whole-service.ts';

t.test('a stop does not wait for a ping under way, but answers it 503', async (t) => {
  const service = await startWholeService(t);
  const receiver = await startReceiver(t, { answers: [silence()] });
  const { keyId, secret } = await service.key();
  const { id } = await newWebhook(service.admin, keyId, { url: receiver.url });
  const answered = requestJson(Number(new URL(service.url).port), 'POST', `/v2/webhooks/${id}/ping`, {
    key: secret,
  });
  await receiver.next();
  await service.stop();
  t.match(await answered, {
    status: 503,
    body: { error: { code: 'unavailable', message: 'the service is stopping' } },
  });
});

t.test('while a ping is under way no other write may use its Idempotency-Key', async (t) => {
  const service = await startWholeService(t);
  const receiver = await startReceiver(t);
  const { keyId, secret } = await service.key();
  const projectId = await service.project({ command: null });
  const { id } = await newWebhook(service.admin, keyId, { url: receiver.url });
  const other = await newWebhook(service.admin, keyId);
  const send = (path: string, body?: unknown, key = secret) =>
    requestJson(Number(new URL(service.url).port), 'POST', path, {
      key,
      body,
      headers: { 'idempotency-key': 'p' },
    });
  const deploy = `/v2/projects/${projectId}/deployments`;
  const { answer, release } = held(status(200));
  receiver.answerWith(answer);
  const ping = send(`/v2/webhooks/${id}/ping`);
  await receiver.next();

  const others: [path: string, body?: unknown][] = [
    [deploy, { ref: 'main' }],
    ['/v2/webhooks', { url: 'https://example.com/another', events: ['deployment.failed'] }],
    [`/v2/webhooks/${other.id}/replay`, { since: '2026-01-01T00:00:00Z' }],
  ];
  for (const [path, body] of others) {
    t.match(
      await send(path, body),
      { status: 422, body: { error: { code: 'idempotency_key_reused' } } },
      path,
    );
  }
  t.strictSame(service.query('SELECT * FROM deployments'), []);
  const stranger = await service.key();
  t.equal((await send(deploy, { ref: 'main' }, stranger.secret)).status, 201, 'each API key has its own');

  release();
  t.match(await ping, { status: 200, body: { status_code: 200 } }, 'the first request wins');
  t.match(await send(`/v2/webhooks/${id}/ping`), { status: 200, body: (await ping).body });
  t.equal((await send(deploy, { ref: 'main' })).status, 422);
});

t.test(
  'a write that may not use an Idempotency-Key does not keep the rightful repeats from it',
  async (t) => {
    const service = await startWholeService(t);
    const { keyId, secret } = await service.key();
    const projectId = await service.project({ command: null });
    const { id } = await newWebhook(service.admin, keyId);
    const send = (path: string, body?: unknown) =>
      requestJson(Number(new URL(service.url).port), 'POST', path, {
        key: secret,
        body,
        headers: { 'idempotency-key': 'd' },
      });
    const deploy = () => send(`/v2/projects/${projectId}/deployments`, { ref: 'main' });
    const { status, body } = await deploy();
    for (let round = 0; round < 5; round++) {
      const [refused, repeated] = await Promise.all([send(`/v2/webhooks/${id}/ping`), deploy()]);
      t.equal(refused.status, 422);
      t.match(repeated, { status, body });
    }
  },
);
