import { join } from 'node:path';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { openForWriting } from '../../src/store/database.ts';
import { walBytesOf, walUseOf } from '../../src/store/wal.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/** https://sqlite.org/fileformat.html#the_write_ahead_log */
const WAL_HEADER_BYTES = 32;

t.test('walUse tells the bytes of a WAL in use from those not copied yet, and copies none', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const database = openForWriting(path, realEffects);
  database.pragma('wal_checkpoint(TRUNCATE)');
  const walUse = walUseOf(database);
  t.strictSame(walUse(), { usedBytes: 0, uncopiedBytes: 0 });

  database.exec('CREATE TABLE big AS SELECT zeroblob(100000) AS bytes');
  const usedBytes = walBytesOf(path) - WAL_HEADER_BYTES;
  t.ok(usedBytes > 100_000);
  t.strictSame(walUse(), { usedBytes, uncopiedBytes: usedBytes });
  t.strictSame(walUse(), { usedBytes, uncopiedBytes: usedBytes });

  database.pragma('wal_checkpoint(PASSIVE)');
  t.strictSame(walUse(), { usedBytes, uncopiedBytes: 0 });
  database.close();
  t.equal(walBytesOf(path), 0, 'there is no WAL any more');
});
