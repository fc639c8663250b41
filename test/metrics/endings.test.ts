import t from 'tap';
import type { DeploymentId } from '../../src/domain.ts';
import { createEndings } from '../../src/metrics/endings.ts';
import { exposition } from '../../src/metrics/exposition.ts';
import { openStore } from '../../src/store/store.ts';
import type { DeploymentEnd } from '../../src/store/transitions.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { movedOf, parseMetrics } from '../helpers/metrics.ts';
import { endOf, newDeployment, type TestStore, testStore } from '../helpers/store.ts';

const FINISHED = 'davit_deployments_finished_total';
const DURATION = 'davit_deployment_duration_seconds';

t.test('ended deployments are counted by status and reason, from zero, each once', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  await end(store, { status: 'succeeded' });
  const endings = createEndings(store.reads);
  const scrape = async () => {
    await endings.catchUp(() => true);
    return parseMetrics(exposition(endings.metrics()));
  };

  const before = await scrape();
  t.strictSame(
    before.series
      .filter(({ name }) => name === FINISHED)
      .map(({ labels }) => `${labels['status']} ${labels['reason']}`.trim()),
    [
      'succeeded',
      ...[
        'exit_code',
        'signal',
        'timeout',
        'idle_timeout',
        'spawn_failed',
        'interrupted',
        'reported',
        'report_timeout',
      ].map((reason) => `failed ${reason}`),
      'canceled user',
      'canceled superseded',
    ],
  );
  t.strictSame(movedOf(before, FINISHED), [], 'what ended before does not count');

  const claimed = await begin(store);
  effects.advance(20_000);
  await end(store, { status: 'succeeded' }, claimed);
  await end(store, { status: 'failed', reason: 'exit_code', exitCode: 3 }, await begin(store));
  await end(store, { status: 'failed', reason: 'timeout' }, await begin(store));
  await end(store, { status: 'canceled', reason: 'user' });
  await end(store, { status: 'canceled', reason: 'user' }, await begin(store));
  await scrape();
  const after = await scrape();
  t.strictSame(movedOf(after, FINISHED), [
    ['canceled user', 2],
    ['failed exit_code', 1],
    ['failed timeout', 1],
    ['succeeded', 1],
  ]);
  t.strictSame(
    movedOf(after, `${DURATION}_count`),
    [
      ['canceled', 1],
      ['failed', 2],
      ['succeeded', 1],
    ],
    'the other canceled one never ran',
  );
  t.strictSame(movedOf(after, `${DURATION}_sum`), [['succeeded', 20]]);
  t.equal(after.value(`${DURATION}_bucket`, { status: 'succeeded', le: '15' }), 0);
  t.equal(after.value(`${DURATION}_bucket`, { status: 'succeeded', le: '30' }), 1);
});

t.test('deployments that another process ended are counted, too, however many', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const endings = createEndings(store.reads);
  const project = await store.project();
  const other = openStore(store.path, effects);
  const count = 700; // with their creations more than one step looks at
  for (let made = 0; made < count; made++) {
    void other.writer.write('deployments.create', newDeployment(project, { maxQueued: null }));
  }
  await other.writer.write('projects.archive', { id: project });
  await other.close();
  await endings.catchUp(() => false);
  const canceled = () =>
    parseMetrics(exposition(endings.metrics())).value(FINISHED, { status: 'canceled', reason: 'user' });
  t.equal(canceled(), 0, 'a scrape that nobody waits for any more is abandoned');
  await endings.catchUp(() => true);
  t.equal(canceled(), count);
});

async function begin(store: TestStore): Promise<DeploymentId> {
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const claimed = await store.writer.write('deployments.claim', undefined);
  if (claimed === null) throw new Error('there is one to claim');
  return claimed.id;
}

async function end(store: TestStore, how: Partial<DeploymentEnd>, begun?: DeploymentId): Promise<void> {
  const id =
    begun ?? (await store.writer.write('deployments.create', newDeployment(await store.project()))).id;
  await store.writer.write('deployments.finish', endOf(id, how));
}
