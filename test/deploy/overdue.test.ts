import t from 'tap';
import { endOverdueReports } from '../../src/deploy/overdue.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, testStore } from '../helpers/store.ts';

t.test('a report that does not come in time is not waited for any longer', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  t.equal(await endOverdueReports(store, effects), null, 'nothing is waited for');
  const [soon, later] = [
    await store.project({ command: null, reportTimeoutMs: 1_000 }),
    await store.project({ command: null, reportTimeoutMs: 5_000 }),
  ];
  const startMs = effects.now();
  for (const projectId of [...Array.from({ length: 150 }, () => soon), later]) {
    await store.writer.write('deployments.create', newDeployment(projectId));
  }
  const untouched = store.dump();
  t.equal(await endOverdueReports(store, effects), startMs + 1_000);
  t.strictSame(store.dump(), untouched);

  effects.advance(1_000);
  t.equal(await endOverdueReports(store, effects), startMs + 5_000, 'however many are due');
  t.strictSame(
    store.query('SELECT status, reason, count(*) AS count FROM deployments GROUP BY 1, 2 ORDER BY 1'),
    [
      { status: 'failed', reason: 'report_timeout', count: 150 },
      { status: 'queued', reason: null, count: 1 },
    ],
  );
  effects.advance(4_000);
  t.equal(await endOverdueReports(store, effects), null);
});
