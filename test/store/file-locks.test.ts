import { statSync } from 'node:fs';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { lockersOf } from '../../src/store/file-locks.ts';
import { filledFile } from '../helpers/filled.ts';

/** SQLite's RESERVED_BYTE, which a write transaction locks: sqlite.org/c3ref/io_methods.html and os.h. */
const RESERVED_BYTE = 0x40000001;

t.test('the processes that have locked a byte of a file are those of that file and that byte', async (t) => {
  const [locked, free] = [filledFile(t), filledFile(t)];
  const database = new Sqlite(locked);
  t.teardown(() => database.close());
  database.exec('PRAGMA journal_mode = DELETE; BEGIN IMMEDIATE');
  t.strictSame(lockersOf(statSync(locked), RESERVED_BYTE), [process.pid]);
  t.strictSame(lockersOf(statSync(locked), RESERVED_BYTE + 1), []);
  t.strictSame(lockersOf(statSync(free), RESERVED_BYTE), []);
});
