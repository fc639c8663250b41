import { symlinkSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { exposition } from '../../src/metrics/exposition.ts';
import { fileFigures } from '../../src/metrics/readings.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a file whose size cannot be read counts as 0 bytes, and does not fail the scrape', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  symlinkSync(path, path);
  const text = exposition(fileFigures(path));
  t.match(text, /^davit_database_size_bytes 0$/m);
  t.match(text, /^davit_wal_size_bytes 0$/m);
});
