import { copyFileSync, renameSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import {
  areInPlace,
  identifyFiles,
  lockPath,
  openInPlace,
  sharedMemoryPath,
  walPath,
  watchPlace,
  writableBytes,
} from '../../src/store/place.ts';
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

t.test('a file of another file system with the same inode number counts as another one', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  writeFileSync(path, '');
  const files = identifyFiles(path);
  t.equal(areInPlace(files), true);
  t.equal(areInPlace(files.map((file) => ({ ...file, dev: file.dev && file.dev + 1 }))), false);
});

t.test('a file is opened in its place only, and closed if it is not there any more', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  writeFileSync(path, '');
  const files = identifyFiles(path);
  let open = 0;
  const opened = { close: () => void open-- };
  const count = () => {
    open += 1;
    return opened;
  };
  t.equal(openInPlace(files, count), opened);
  const moving = () => {
    renameSync(path, `${path}.elsewhere`);
    return count();
  };
  t.equal(openInPlace(files, moving), undefined);
  t.equal(open, 1);
  const refused = () => t.fail('another file may be there') as never;
  t.equal(openInPlace(files, refused), undefined);
});

t.test('root can write also to what a file system reserves for it', async (t) => {
  for (const [userId, bytes] of [
    [0, 300],
    [1_000, 200],
  ] as const) {
    t.intercept(process, 'geteuid', { value: () => userId });
    t.equal(writableBytes({ bfree: 3, bavail: 2, bsize: 100 } as never), bytes);
  }
});
