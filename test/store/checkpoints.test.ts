import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { realEffects } from '../../src/effects.ts';
import { createCheckpoints } from '../../src/store/checkpoints.ts';
import { openForWriting } from '../../src/store/database.ts';
import { walUseOf } from '../../src/store/wal.ts';
import { type CheckpointKind, writerMetrics } from '../../src/store/writer-metrics.ts';
import { until } from '../helpers/commands.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const KIB = 1024;
const MIB = 1024 * KIB;

t.test('a WAL of a usual length is copied by the thread alone', async (t) => {
  const { checkpoints, kinds, write, writeMeanwhile, walUse } = setUp(t);
  write(5 * MIB);
  writeMeanwhile(100 * KIB);
  t.ok(checkpoints.poll());
  t.notOk(checkpoints.poll(), 'nothing was written since');
  await until(() => kinds.length > 0);
  t.strictSame(kinds, ['background']);
  t.ok(walUse().uncopiedBytes >= 100 * KIB);
});

t.test('of a long WAL the writer copies what is left, so that the next write starts it over', async (t) => {
  const { checkpoints, kinds, write, writeMeanwhile, walUse } = setUp(t);
  write(33 * MIB);
  writeMeanwhile(100 * KIB);
  checkpoints.poll();
  await until(() => kinds.length > 0);
  t.strictSame(kinds, ['background', 'catch_up']);
  write(1);
  t.ok(walUse().usedBytes < MIB);
});

t.test('while much is left of a long WAL, the thread copies again, three times at most', async (t) => {
  const { checkpoints, kinds, write, writeMeanwhile } = setUp(t, () => {
    if (kinds.length < 6) writeMeanwhile(MIB);
  });
  write(33 * MIB);
  writeMeanwhile(MIB);
  checkpoints.poll();
  await until(() => kinds.includes('catch_up'));
  t.strictSame(kinds, ['background', 'background', 'background', 'background', 'catch_up']);
});

t.test('what the thread copied last is not followed up after the end', async (t) => {
  const { checkpoints, kinds, write } = setUp(t);
  write(33 * MIB);
  checkpoints.poll();
  await checkpoints.end();
  t.strictSame(kinds, []);
});

/** Checkpoints of a file of their own; `onCopied` is called when the thread has copied, before what follows. */
function setUp(t: Test, onCopied = () => {}) {
  const path = join(temporaryDirectory(t), 'davit.db');
  const database = openForWriting(path, realEffects);
  database.exec('CREATE TABLE written (bytes BLOB)');
  const insert = database.prepare<[number]>('INSERT INTO written VALUES (zeroblob(?))');
  const reader = new Sqlite(path);
  const kinds: CheckpointKind[] = [];
  const metrics = {
    ...writerMetrics(new SharedArrayBuffer(64 * KIB)),
    checkpointed(kind: CheckpointKind) {
      kinds.push(kind);
      if (reader.inTransaction) reader.exec('COMMIT');
      if (kind === 'background') onCopied();
    },
  };
  const checkpoints = createCheckpoints(path, database, realEffects, metrics);
  t.teardown(async () => {
    await checkpoints.end();
    reader.close();
    database.close();
  });
  return { checkpoints, kinds, write, writeMeanwhile, walUse: walUseOf(database) };

  function write(bytes: number): void {
    insert.run(bytes);
  }

  /** As if it were written while the thread copies: a reader keeps it from what follows. */
  function writeMeanwhile(bytes: number): void {
    reader.exec('BEGIN; SELECT count(*) FROM instance');
    write(bytes);
  }
}
