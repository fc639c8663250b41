import { symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { exposition } from '../../src/metrics/exposition.ts';
import { deploymentMetrics, dueMetrics, fileMetrics } from '../../src/metrics/readings.ts';
import { newWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { parseMetrics } from '../helpers/metrics.ts';
import { newDeployment, temporaryDirectory, testStore } from '../helpers/store.ts';

t.test('the age of the oldest due delivery is in seconds', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId } = await store.key();
  await newWebhook(store, keyId);
  await store.writer.write('deployments.create', newDeployment(await store.project()));
  const { value } = parseMetrics(
    exposition(await dueMetrics(store.reads, effects.now() + 2_500, () => true)),
  );
  t.equal(value('davit_delivery_oldest_due_age_seconds', { receiver: 'healthy' }), 2.5);
  t.equal(value('davit_deliveries_due', { receiver: 'healthy' }), 1);
});

t.test(
  'unfinished deployments are told by status and runner, 0 of those that there are none of',
  async (t) => {
    const rows = [
      { status: 'queued', reported: false, count: 5 },
      { status: 'queued', reported: true, count: 4 },
      { status: 'running', reported: true, count: 3 },
      { status: 'canceling', reported: false, count: 2 },
    ];
    const reads = { gauges: { unfinished: () => rows } } as never;
    const scrape = parseMetrics(exposition(deploymentMetrics(reads, 8)));
    t.strictSame(
      scrape.series
        .filter(({ name }) => name === 'davit_deployments')
        .map(({ labels, value }) => [labels, value]),
      [
        [{ status: 'queued', runner: 'davit' }, 5],
        [{ status: 'running', runner: 'davit' }, 0],
        [{ status: 'canceling', runner: 'davit' }, 2],
        [{ status: 'queued', runner: 'external' }, 4],
        [{ status: 'running', runner: 'external' }, 3],
        [{ status: 'canceling', runner: 'external' }, 0],
      ],
    );
    t.equal(scrape.value('davit_command_slots'), 8);
  },
);

t.test('the sizes are those of the file and of its WAL', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  writeFileSync(path, 'the file');
  writeFileSync(`${path}-wal`, 'WAL');
  const { value } = parseMetrics(exposition(fileMetrics(path)));
  t.equal(value('davit_database_size_bytes'), 8);
  t.equal(value('davit_wal_size_bytes'), 3);
});

t.test('a file whose size cannot be read counts as 0 bytes, and does not fail the scrape', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  symlinkSync(path, path);
  const text = exposition(fileMetrics(path));
  t.match(text, /^davit_database_size_bytes 0$/m);
  t.match(text, /^davit_wal_size_bytes 0$/m);
});
