import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import type { DeploymentId, KeyId } from '../../src/domain.ts';
import { createWatches } from '../../src/http/watches.ts';
import { logChange } from '../../src/store/logs.ts';
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
