import { connect } from 'node:net';
import { text } from 'node:stream/consumers';
import t from 'tap';
import { place } from '../helpers/cli.ts';
import { startReceiver, unfinished } from '../helpers/receiver.ts';
import { serveWithLog } from '../helpers/served.ts';

/** Part of every value that must not appear in the log. */
const MARK = 'Zq7secretZq7';

t.test('every request has one line in the log, and no secret and no body is in it', async (t) => {
  const { directory, davit, json } = place(t);
  const receiver = await startReceiver(t, {
    answers: [(response) => response.writeHead(500, { 'x-note': MARK }).end(`${MARK}-of-the-receiver`)],
  });
  const variables = [`TOKEN=${MARK}-of-the-project`, `EVIL=\u001b]0;${MARK}\u0007`];
  const script = `echo ${MARK}-output "$TOKEN"; echo "out=${MARK}" >>"$DEPLOY_OUTPUT"; echo "$EVIL" >&2; exit 3`;
  const made = await davit([
    ...['admin', 'project', 'create', '--name', 'website'],
    ...variables.flatMap((pair) => ['--env', pair]),
    ...['--', 'sh', '-c', script],
  ]);
  const missing = await davit(['admin', 'project', 'create', '--name', 'broken', '--', `/nowhere/${MARK}`]);
  const reported = await davit(['admin', 'project', 'create', '--name', 'reported']);
  const [projectId, brokenId, reportedId] = [made, missing, reported].map(({ stdout }) => stdout.trim());
  const key = await json<{ id: string; secret: string }>([
    ...['admin', 'key', 'create', '--name', 'ci'],
    ...['--all-scopes', '--all-projects'],
  ]);
  const service = await serveWithLog(t, directory, {
    options: [
      ...['--log-level', 'debug', '--webhook-allow-http', '--webhook-allow-cidr', '127.0.0.0/8'],
      ...['--webhook-retry-delays', '1h'],
    ],
  });

  const answers: { requestId: string | null; status: number; key: boolean; route: boolean }[] = [];
  const call = async (method: string, path: string, body?: unknown, headers: Record<string, string> = {}) => {
    const sent = { authorization: `Bearer ${key.secret}`, 'content-type': 'application/json', ...headers };
    const response = await fetch(service.url + path, {
      method,
      headers: sent,
      ...(body === undefined ? {} : { body: typeof body === 'string' ? body : JSON.stringify(body) }),
    });
    answers.push({
      requestId: response.headers.get('x-request-id'),
      status: response.status,
      // What cannot be read, or leads nowhere, is answered before anybody asks for a key.
      key:
        ![401, 405, 415].includes(response.status) && typeof body !== 'string' && !path.includes('nowhere'),
      route: response.status !== 405 && !path.includes('nowhere'),
    });
    const answer = await response.text();
    return answer === '' ? {} : JSON.parse(answer);
  };

  const webhook = await call('POST', '/v2/webhooks', {
    url: receiver.url.replace('/hook', `/${MARK}?token=${MARK}`),
    events: ['deployment.failed', 'deployment.created'],
    description: MARK,
  });
  const rotated = await call('POST', `/v2/webhooks/${webhook.id}/rotate`, {});
  await call('PATCH', `/v2/webhooks/${webhook.id}`, { description: `${MARK} again` });
  await call('POST', `/v2/webhooks/${webhook.id}/ping`);
  const once = { 'idempotency-key': `${MARK}-once` };
  const deployment = await call('POST', `/v2/projects/${projectId}/deployments`, { ref: 'v1' }, once);
  await call('POST', `/v2/projects/${projectId}/deployments`, { ref: 'v1' }, once);
  await call('POST', `/v2/projects/${projectId}/deployments`, { ref: 'v2' }, once);
  const broken = await call('POST', `/v2/projects/${brokenId}/deployments`, { ref: 'v1' });
  const elsewhere = await call('POST', `/v2/projects/${reportedId}/deployments`, { ref: 'v1' });
  await call('POST', `/v2/deployments/${elsewhere.id}/report`, {
    status: 'failed',
    message: MARK,
    outputs: { MARK },
  });
  await call('GET', `/v2/deployments/${deployment.id}?wait=60`);
  await call('GET', `/v2/deployments/${broken.id}?wait=60`);
  await call('POST', `/v2/projects/${projectId}/deployments`, { ref: `${MARK}..`, [MARK]: MARK });
  await call('POST', `/v2/projects/${projectId}/deployments`, `{"ref": ${MARK}`);
  await call('POST', `/v2/projects/${projectId}/deployments`, MARK, { 'content-type': `text/${MARK}` });
  await call('GET', `/v2/projects?cursor=${MARK}`);
  await call('GET', `/v2/deployments/dpl_${MARK}`);
  await call('GET', `/nowhere/${MARK}?${MARK}=${MARK}`);
  await call('DELETE', `/v2/projects/${projectId}`);
  await call('GET', '/v2/projects', undefined, { authorization: `Bearer davit_${MARK}` });
  await call('GET', '/v2/projects', undefined, {
    authorization: `Basic ${MARK}`,
    cookie: MARK,
    'x-note': MARK,
  });
  await notHttp(Number(new URL(service.url).port));
  // The attempts of two events for each of the three deployments, and the ping.
  for (let count = 0; count < 7; count++) await receiver.next();
  await davit(['admin', 'key', 'revoke', 'ci', '--yes']);
  await call('GET', '/v2/projects');
  t.equal(await service.stop(), 0);

  const log = service.log();
  for (const { requestId, status, key: hasKey, route } of answers) {
    const [line, ...more] = log.filter(
      ({ request_id, msg }) => request_id === requestId && msg === 'request',
    );
    t.strictSame(more, [], 'each has one line');
    t.match(line, {
      level: 'info',
      time: /^\d{4}-\d\d-\d\dT[\d:.]+Z$/,
      key_id: hasKey ? key.id : null,
      method: /^[A-Z]+$/,
      route: route ? /^\/v2\// : null,
      status,
      duration_ms: Number,
    });
  }
  const secrets = [key.secret, webhook.signing_secret, rotated.signing_secret].map(String);
  for (const secret of [MARK, ...secrets, ...secrets.map((secret) => secret.slice(6, 30))]) {
    t.notOk(service.stderr().includes(secret), `${secret} is not in the log`);
  }
  for (const message of [
    'request',
    'not a request',
    'delivery attempt',
    'deployment started',
    'deployment ended',
  ]) {
    t.ok(
      log.some(({ msg }) => msg === message),
      `there is a line: ${message}`,
    );
  }
});

t.test('a stop records and logs an answer whose body has not ended', async (t) => {
  const { directory, davit, json, dump } = place(t);
  const receiver = await startReceiver(t, { answers: [unfinished(200, 'thank ')] });
  const { stdout } = await davit(['admin', 'project', 'create', '--name', 'website']);
  const { secret } = await json<{ secret: string }>([
    ...['admin', 'key', 'create', '--name', 'ci'],
    ...['--all-scopes', '--all-projects'],
  ]);
  const service = await serveWithLog(t, directory, {
    options: ['--log-level', 'debug', '--webhook-allow-http', '--webhook-allow-cidr', '127.0.0.0/8'],
  });
  const post = (path: string, body: unknown) =>
    fetch(service.url + path, {
      method: 'POST',
      headers: { authorization: `Bearer ${secret}`, 'content-type': 'application/json' },
      body: JSON.stringify(body),
    });
  await post('/v2/webhooks', { url: receiver.url, events: ['deployment.created'] });
  await post(`/v2/projects/${stdout.trim()}/deployments`, { ref: 'main' });
  await receiver.next();
  t.equal(await service.stop(), 0);
  t.match(dump()['deliveries'], [{ status: 'delivered', attempt_count: 1 }]);
  t.match(
    service.log().filter(({ msg }) => msg === 'delivery attempt'),
    [{ status_code: 200 }],
  );
});

/** Sends what the HTTP parser refuses. */
async function notHttp(port: number): Promise<void> {
  const socket = connect(port, '127.0.0.1');
  socket.end(`${MARK} / HTTP/9\r\n${MARK}: ${MARK}\r\n\r\n`);
  await text(socket);
}
