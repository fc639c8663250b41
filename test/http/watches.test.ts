import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import type { DeploymentId, KeyId } from '../../src/domain.ts';
import { createWatches } from '../../src/http/watches.ts';
import { logChange } from '../../src/store/context.ts';
import { openStore } from '../../src/store/store.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, testStore } from '../helpers/store.ts';
import { countWatches } from '../helpers/watches.ts';
import { startWholeService } from '../helpers/whole-service.ts';

t.test('a watch hears of what it is for, and of nothing else', async (t) => {
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
    await store.writer.write('logs.append', {
      id,
      chunks: [{ start: 0, bytes: Buffer.from('x') }],
      logBytes: 1,
      truncated: false,
      dropTailBefore: null,
      headBytes: 1,
    });
  }
});

t.test('what happens while nobody asks is not forgotten, and told once', async (t) => {
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

t.test('a closed watch says so, now and ever after', async (t) => {
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

t.test('when the service stops, all end, and nobody begins to wait', async (t) => {
  const { watches, ids } = await setUp(t);
  const waiting = [1, 2, 3].map(() => watches.open(ids, KEY).next(60_000));
  await watches.close();
  t.strictSame(await Promise.all(waiting), ['closed', 'closed', 'closed']);
  t.throws(() => watches.open(ids, KEY), { code: 'unavailable' });
  t.equal(watches.size(), 0);
  await watches.close();
});

t.test('a service that stops ends what it still has to say, and cuts nobody off', async (t) => {
  const service = await startWholeService(t);
  const { secret } = await service.key();
  const projectId = await service.project({ command: null });
  const { id } = await service.admin.writer.write('deployments.create', newDeployment(projectId));
  const log = await fetch(`${service.url}/v2/deployments/${id}/logs`, {
    headers: { authorization: `Bearer ${secret}`, accept: 'text/event-stream' },
  });
  await service.stop();
  t.equal(await log.text(), 'retry: 1000\n\n');
});

t.test('commits of other processes are looked for twice a second', async (t) => {
  const { effects, store, watches, ids } = await setUp(t);
  const admin = openStore(store.path, effects);
  t.teardown(admin.close);
  const watch = watches.open([ids[0]], KEY);
  const before = watches.commits();
  await admin.writer.write('deployments.cancel', { id: ids[0] });
  const waiting = watch.next(60_000);
  effects.advance(499);
  t.equal(await Promise.race([waiting, nextTurn('still')]), 'still');
  effects.advance(1);
  t.equal(await waiting, 'changed');
  t.ok(watches.commits() > before);

  await nextTurn();
  const heard = watches.commits();
  effects.advance(500);
  // The next look, in a turn of its own.
  await nextTurn();
  await nextTurn();
  t.equal(watches.commits(), heard, 'and heard of once');
  t.equal(await watch.next(0), 'timedOut');
});

t.test('a look that fails wakes who waits, to find out for himself', async (t) => {
  const { effects, store, ids } = await setUp(t);
  let isBroken = false;
  const dataVersion = () => {
    if (isBroken) throw new Error('the disk is gone');
    return store.reads.instance.dataVersion();
  };
  const reads = { ...store.reads, instance: { ...store.reads.instance, dataVersion } };
  const watches = createWatches({ ...store, reads }, effects);
  t.teardown(watches.close);
  await nextTurn();
  isBroken = true;
  const waiting = watches.open([ids[0]], KEY).next(60_000);
  effects.advance(500);
  t.equal(await waiting, 'changed');
});

t.test('where it is not known what was written, all are woken', async (t) => {
  const { effects, store, ids } = await setUp(t);
  let tell: Parameters<typeof store.writer.onCommit>[0] = () => undefined;
  const onCommit: typeof store.writer.onCommit = (listener) => {
    tell = listener;
    return () => undefined;
  };
  const watches = createWatches({ ...store, writer: { ...store.writer, onCommit } }, effects);
  t.teardown(watches.close);
  const open = ids.map((id) => watches.open([id], KEY));
  tell(new Set(['everything']));
  for (const watch of open) t.equal(await watch.next(0), 'changed');
});

t.test('who has gone leaves room, to his key and to all', async (t) => {
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
  const watches = countWatches(createWatches(store, effects));
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
