import { once } from 'node:events';
import { IncomingMessage, ServerResponse } from 'node:http';
import { Socket } from 'node:net';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import type { DeploymentId, KeyId } from '../../src/domain.ts';
import { closeWithResponse, createWatches } from '../../src/http/watches.ts';
import { logChange } from '../../src/store/changes.ts';
import { giveUpReading } from '../../src/unread.ts';
import { startDeploymentsHttp } from '../helpers/deploying.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { rawRequest } from '../helpers/http.ts';
import { appendTo, newDeployment, testStore } from '../helpers/store.ts';
import { countWatches } from '../helpers/watches.ts';
import { startWholeService } from '../helpers/whole-service.ts';

t.test('a watch is told of changes to its own deployments and logs only', async (t) => {
  const { effects, store, watches, ids } = await setUp(t);
  const [first, second] = ids;
  const watch = watches.open([first], KEY);
  const withLog = watches.open([first, logChange(first)], KEY);
  await store.writer.write('deployments.cancel', { id: second });
  await print(first);
  t.equal(await withLog.next(1_000), 'changed');
  const waiting = watch.next(1_000);
  effects.advance(1_000);
  t.equal(await waiting, 'timedOut');
  await store.writer.write('deployments.cancel', { id: first });
  t.equal(await watch.next(1_000), 'changed');
  t.equal(await withLog.next(1_000), 'changed');

  async function print(id: DeploymentId): Promise<void> {
    const chunks = [{ start: 0, bytes: Buffer.from('x') }];
    await store.writer.write('logs.append', appendTo(id, chunks, { headBytes: 1 }));
  }
});

t.test('a change before next() is called is told by that call, and by it alone', async (t) => {
  const { effects, store, watches, ids } = await setUp(t);
  const watch = watches.open(ids, KEY);
  for (const id of ids) await store.writer.write('deployments.cancel', { id });
  t.equal(await watch.next(0), 'changed');
  t.equal(await watch.next(0), 'timedOut');
  const waiting = watch.next(60_000);
  effects.advance(59_999);
  t.equal(await Promise.race([waiting, nextTurn('still')]), 'still');
  effects.advance(1);
  t.equal(await waiting, 'timedOut');
});

t.test('a change is told at once also after the time of an earlier wait', async (t) => {
  const { effects, store, watches, ids } = await setUp(t);
  const watch = watches.open(ids, KEY);
  const earlier = watch.next(1_000);
  await store.writer.write('deployments.cancel', { id: ids[0] });
  t.equal(await earlier, 'changed');
  const waiting = watch.next(60_000);
  effects.advance(1_000);
  await store.writer.write('deployments.cancel', { id: ids[1] });
  t.equal(await Promise.race([waiting, nextTurn('still waits')]), 'changed');
});

t.test('every next() of a closed watch gives closed', async (t) => {
  const { store, watches, ids } = await setUp(t);
  const watch = watches.open(ids, KEY);
  const waiting = watch.next(60_000);
  watch.close();
  t.equal(await waiting, 'closed');
  t.equal(await watch.next(60_000), 'closed');
  watch.close();
  t.equal(watches.size(), 0);
  await store.writer.write('deployments.cancel', { id: ids[0] });
  t.equal(await watch.next(0), 'closed');
});

t.test('a watch ends once answered or its client is read no more, also if that was before', async (t) => {
  const { watches, ids } = await setUp(t);
  const responseOn = (socket: Socket) => new ServerResponse(new IncomingMessage(socket));
  const waitWith = (res: ServerResponse) => {
    const watch = watches.open(ids, KEY);
    closeWithResponse(watch, { raw: { req: res.req, res } });
    return Promise.race([watch.next(60_000), nextTurn('waits')]);
  };
  const socket = new Socket({ allowHalfOpen: true });
  const listeners = socket.listenerCount('end');
  const answered = responseOn(socket);
  const waiting = waitWith(answered);
  answered.destroy();
  t.equal(await waiting, 'closed');
  t.equal(await waitWith(answered), 'closed');
  t.equal(socket.listenerCount('end'), listeners, 'nothing is left on the connection');

  const other = new Socket({ allowHalfOpen: true });
  for (const connection of [socket, other]) t.equal(await waitWith(responseOn(connection)), 'waits');
  socket.resume().push(null);
  await once(socket, 'end');
  giveUpReading(other);
  t.equal(watches.size(), 0);
  for (const connection of [socket, other]) t.equal(await waitWith(responseOn(connection)), 'closed');
});

t.test('when the service stops, all watches are closed and no new one is opened', async (t) => {
  const { watches, ids } = await setUp(t);
  const waiting = [1, 2, 3].map(() => watches.open(ids, KEY).next(60_000));
  watches.close();
  t.strictSame(await Promise.all(waiting), ['closed', 'closed', 'closed']);
  t.throws(() => watches.open(ids, KEY), { code: 'unavailable' });
  t.equal(watches.size(), 0);
  watches.close();
});

t.test('a service that stops ends an event stream properly, without an end event', async (t) => {
  const service = await startWholeService(t);
  const { secret } = await service.key();
  const projectId = await service.project({ command: null });
  const { id } = await service.admin.writer.write('deployments.create', newDeployment(projectId));
  const chunks = [{ start: 0, bytes: Buffer.from('one\n') }];
  await service.admin.writer.write('logs.append', appendTo(id, chunks));
  const log = await fetch(`${service.url}/v2/deployments/${id}/logs`, {
    headers: { authorization: `Bearer ${secret}`, accept: 'text/event-stream' },
  });
  await service.stop();
  t.equal(await log.text(), 'retry: 1000\nid: 0\n\nid: 4\ndata: one\ndata: \n\n');
});

t.test(
  'requests that wait are told of what another process wrote, long before they look again',
  async (t) => {
    const service = await startWholeService(t);
    const { secret } = await service.key();
    const projectId = await service.project({ command: null });
    const { id } = await service.admin.writer.write('deployments.create', newDeployment(projectId));
    const address = `${service.url}/v2/deployments/${id}`;
    const headers = { authorization: `Bearer ${secret}` };
    const waiting = fetch(`${address}?wait=60`, { headers });
    const log = await fetch(`${address}/logs`, { headers: { ...headers, accept: 'text/event-stream' } });
    const wroteAtMs = performance.now();
    await service.admin.writer.write('deployments.cancel', { id });
    t.match(await log.text(), /event: end\ndata: \{"status":"canceled"\}/);
    t.match(await (await waiting).json(), { status: 'canceled' });
    t.ok(performance.now() - wroteAtMs < 5_000);
  },
);

t.test('a request too many on a connection ends the waits before it', async (t) => {
  const http = await startDeploymentsHttp(t);
  const { secret } = await http.store.key();
  const projectId = await http.store.project({ command: null });
  const { id } = await http.store.writer.write('deployments.create', newDeployment(projectId));
  const head = `Host: d\r\nAuthorization: Bearer ${secret}\r\n`;
  for (const request of [
    `GET /v2/deployments/${id}?wait=60 HTTP/1.1\r\n${head}\r\n`,
    `GET /v2/deployments/${id}/logs HTTP/1.1\r\nAccept: text/event-stream\r\n${head}\r\n`,
  ]) {
    const answers = await rawRequest(http.port, request.repeat(101));
    t.equal(answers.split('HTTP/1.1 200 ').length - 1, 100);
    t.match(answers, /HTTP\/1\.1 503 .*wait for their answers/s);
    t.equal(http.watches.size(), 0);
  }
});

t.test('a commit of unknown changes wakes all watches', async (t) => {
  const { effects, store, ids } = await setUp(t);
  let tell: Parameters<typeof store.writer.onCommit>[0] = () => undefined;
  const onCommit: typeof store.writer.onCommit = (listener) => {
    tell = listener;
  };
  const watches = createWatches({ onCommit }, effects);
  t.teardown(watches.close);
  const open = ids.map((id) => watches.open([id], KEY));
  tell(new Set(['everything']));
  for (const watch of open) t.equal(await watch.next(0), 'changed');
});

t.test('a closed watch makes room under the limit of its key and under that of all keys', async (t) => {
  const { watches, ids } = await setUp(t);
  const held = Array.from({ length: 500 }, () => watches.open(ids, KEY));
  for (const watch of held.slice(0, 3)) {
    t.throws(() => watches.open(ids, KEY), { code: 'rate_limited' });
    watch.close();
    watches.open(ids, KEY);
  }
  for (let count = 0; count < 500; count++) watches.open(ids, `key_${count}` as KeyId);
  t.throws(() => watches.open(ids, 'key_late' as KeyId), { code: 'unavailable' });
  held.at(-1)?.close();
  watches.open(ids, 'key_late' as KeyId);
});

const KEY = 'key_test' as KeyId;

async function setUp(t: Test) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const watches = countWatches(createWatches(store.writer, effects));
  t.teardown(watches.close);
  await nextTurn();
  const projectId = await store.project();
  const [first, second] = [
    await store.writer.write('deployments.create', newDeployment(projectId)),
    await store.writer.write('deployments.create', newDeployment(projectId)),
  ];
  const ids: [DeploymentId, DeploymentId] = [first.id, second.id];
  return { effects, store, watches, ids };
}
