import t from 'tap';
import type { ProjectId } from '../../src/domain.ts';
import type { AnswerRequest } from '../../src/store/operations.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, type TestStore, testStore } from '../helpers/store.ts';

t.test('fifty concurrent repeats make one deployment and fifty identical answers', async (t) => {
  const store = testStore(t);
  const request = await deploymentRequest(store, 'one');
  const answers = await Promise.all(Array.from({ length: 50 }, () => store.writer.write('answer', request)));

  t.equal(
    new Set(answers.map(({ body, location, statusCode }) => `${statusCode} ${location} ${body}`)).size,
    1,
  );
  t.equal(answers.filter(({ replayed }) => !replayed).length, 1);
  t.strictSame(store.query('SELECT count(*) AS deployments FROM deployments'), [{ deployments: 1 }]);
});

t.test('another request with the same idempotency key is rejected and changes nothing', async (t) => {
  const store = testStore(t);
  const request = await deploymentRequest(store, 'one');
  await store.writer.write('answer', request);
  const before = store.dump();
  await t.rejects(store.writer.write('answer', withHash(request, 2)), { code: 'idempotency_key_reused' });
  t.strictSame(store.dump(), before);
});

t.test('a rejection is not remembered: the same idempotency key may succeed later', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const request = await deploymentRequest(store, 'one', projectId);
  await store.writer.write('projects.setStatus', { id: projectId, status: 'archived' });
  await t.rejects(store.writer.write('answer', request), { code: 'conflict' });
  t.strictSame(store.query('SELECT * FROM idempotency_keys'), []);

  await store.writer.write('projects.setStatus', { id: projectId, status: 'active' });
  t.match(await store.writer.write('answer', request), { statusCode: 201, replayed: false });
});

t.test('an answer is remembered from the time of the answer on', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const request = await deploymentRequest(store, 'one');
  effects.advance(1_000);
  await store.writer.write('answer', request);
  t.strictSame(store.query('SELECT created_at FROM idempotency_keys'), [{ created_at: effects.now() }]);
});

t.test('a repeated request is replayed even if the state would forbid it by now', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const request = await deploymentRequest(store, 'one', projectId);
  const first = await store.writer.write('answer', request);
  await store.writer.write('projects.setStatus', { id: projectId, status: 'archived' });
  t.strictSame(await store.writer.write('answer', request), { ...first, replayed: true });
});

t.test('without an idempotency key nothing is remembered, and each request is performed', async (t) => {
  const store = testStore(t);
  const request: AnswerRequest = { ...(await deploymentRequest(store, 'one')), identity: null };
  for (const deployments of [1, 2]) {
    t.match(await store.writer.write('answer', request), { statusCode: 201, replayed: false });
    t.equal(store.query('SELECT * FROM deployments').length, deployments);
  }
  t.strictSame(store.query('SELECT * FROM idempotency_keys'), []);
});

t.test('idempotency keys are separate for each API key, and from each other', async (t) => {
  const store = testStore(t);
  const one = await deploymentRequest(store, 'same');
  const requests = [one, await deploymentRequest(store, 'same'), withKey(one, 'another')];
  const answers = [];
  for (const request of requests) answers.push(await store.writer.write('answer', request));
  t.strictSame(
    answers.map(({ replayed }) => replayed),
    [false, false, false],
  );
  t.equal(new Set(answers.map(({ body }) => body)).size, 3);
});

async function deploymentRequest(
  store: TestStore,
  idempotencyKey: string,
  projectId?: ProjectId,
): Promise<AnswerRequest> {
  const { keyId } = await store.key();
  return {
    operation: 'deployments.create',
    input: newDeployment(projectId ?? (await store.project()), { keyId }),
    keyId,
    identity: { keyId, idempotencyKey, requestHash: Buffer.alloc(32, 1) },
    statusCode: 201,
    locationPrefix: '/v2/deployments/',
  };
}

function withKey(request: AnswerRequest, idempotencyKey: string): AnswerRequest {
  if (request.identity === null) throw new Error('a request without an idempotency key');
  return { ...request, identity: { ...request.identity, idempotencyKey } };
}

function withHash(request: AnswerRequest, fill: number): AnswerRequest {
  if (request.identity === null) throw new Error('a request without an idempotency key');
  return { ...request, identity: { ...request.identity, requestHash: Buffer.alloc(32, fill) } };
}
