import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import t, { type Test } from 'tap';
import { checkDisk, tryDisk } from '../../src/cli/doctor-disk.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { temporaryDirectory } from '../helpers/store.ts';
import { unnamedErrors } from '../helpers/unnamed-errors.ts';

t.test('a disk with room that takes a write is well, and no trace of the write is left', async (t) => {
  const path = file(t);
  const before = writtenBytes();
  const trial = await tryDisk(path, fakeEffects());
  t.equal(trial, undefined);
  t.ok(writtenBytes() - before >= 64 * 1024, 'as much as a start needs is written');
  t.match(checkDisk(path, trial), [{ level: 'ok' }]);
  t.strictSame(readdirSync(dirname(path)), ['davit.db']);
});

t.test('a disk with room that refuses a write is a problem', async (t) => {
  const path = file(t);
  const EIO = Object.assign(new Error('EIO: i/o error, fsync'), { code: 'EIO' });
  for (const [error, code, advice] of [
    [unnamedErrors(-122).written, 'EDQUOT', /^usually a quota is used up/],
    [EIO, 'EIO', /^usually the disk fails: .*dmesg/],
  ] as const) {
    const trial = await tryDisk(path, fakeEffects(), () => Promise.reject(error));
    t.match(checkDisk(path, trial), [
      {
        level: 'problem',
        message: new RegExp(
          `^nothing can be written to the disk of the file \\(${code}\\), though .* are free there$`,
        ),
        advice,
      },
    ]);
  }
  const without = Object.assign(new Error('EOPNOTSUPP'), { code: 'EOPNOTSUPP' });
  t.equal(await tryDisk(path, fakeEffects(), () => Promise.reject(without)), undefined);
});

t.test('a disk that does not answer is a problem, after 10 s', async (t) => {
  const path = file(t);
  const effects = fakeEffects();
  const tried = tryDisk(path, effects, () => new Promise(() => undefined));
  effects.advance(10_000);
  t.match(checkDisk(path, await tried), [
    {
      level: 'problem',
      message: 'the disk of the file has not ended a write within 10 s: nothing in the file was checked',
      advice: /dmesg/,
    },
  ]);
});

function file(t: Test): string {
  const path = join(temporaryDirectory(t), 'davit.db');
  writeFileSync(path, 'small', { mode: 0o600 });
  return path;
}

/** By this process since its start, proc_pid_io(5). */
function writtenBytes(): number {
  return Number(/^wchar: (\d+)$/m.exec(readFileSync('/proc/self/io', 'utf8'))?.[1]);
}
