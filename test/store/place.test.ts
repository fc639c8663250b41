import { copyFileSync, renameSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { lockPath, sharedMemoryPath, walPath, watchPlace } from '../../src/store/place.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a look that found all files in their places holds for 10 ms', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  const sides = ['', '-wal', '-shm'];
  for (const side of sides) writeFileSync(path + side, '');
  for (const side of sides) {
    const effects = fakeEffects();
    const isInPlace = watchPlace(path, effects);
    const moveAway = () => renameSync(path + side, `${path}.elsewhere`);
    const moveBack = () => renameSync(`${path}.elsewhere`, path + side);

    moveAway();
    effects.advance(9);
    t.equal(isInPlace(), true);
    effects.advance(1);
    t.equal(isInPlace(), false, side);
    t.equal(isInPlace(), false);
    moveBack();
    t.equal(isInPlace(), true);
    moveAway();
    t.equal(isInPlace(), true);
    effects.advance(10);
    t.equal(isInPlace(), false);
    moveBack();
  }
});

t.test('what belongs to a database is beside the file, not beside a link to it', async (t) => {
  const directory = temporaryDirectory(t);
  const [path, link] = [join(directory, 'davit.db'), join(directory, 'link.db')];
  symlinkSync(path, link);
  t.strictSame(
    [walPath(link), sharedMemoryPath(link), lockPath(link)],
    ['-wal', '-shm', '-lock'].map((side) => path + side),
  );
});

t.test('a link that leads to another file by now counts as moved', async (t) => {
  const directory = temporaryDirectory(t);
  const [path, file] = [join(directory, 'davit.db'), join(directory, 'file.db')];
  writeFileSync(file, '');
  symlinkSync(file, path);
  const effects = fakeEffects();
  const isInPlace = watchPlace(path, effects);
  copyFileSync(file, `${file}.copy`);
  rmSync(path);
  symlinkSync(`${file}.copy`, path);
  effects.advance(10);
  t.equal(isInPlace(), false);
});
