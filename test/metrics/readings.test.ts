import { symlinkSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { exposition } from '../../src/metrics/exposition.ts';
import { dueMetrics, fileMetrics } from '../../src/metrics/readings.ts';
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

t.test('a file whose size cannot be read counts as 0 bytes, and does not fail the scrape', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  symlinkSync(path, path);
  const text = exposition(fileMetrics(path));
  t.match(text, /^davit_database_size_bytes 0$/m);
  t.match(text, /^davit_wal_size_bytes 0$/m);
});
