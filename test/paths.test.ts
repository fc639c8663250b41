import { mkdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { join, resolve } from 'node:path';
import t from 'tap';
import { absolutePath, namesDirectory, realPath } from '../src/paths.ts';
import { temporaryDirectory } from './helpers/store.ts';

t.test('an absolute path is as short as it can be without another meaning', async (t) => {
  for (const path of ['davit.db', './davit.db', '../davit.db', '.././davit.db', '/tmp//davit.db', '..'])
    t.equal(absolutePath(path), resolve(path));
  t.equal(absolutePath('a/../davit.db'), `${process.cwd()}/a/../davit.db`);
  t.equal(absolutePath('./a/./..'), `${process.cwd()}/./a/./..`);
  t.equal(absolutePath('/a/../davit.db'), '/a/../davit.db');
});

t.test('a path that ends in / or /. can only be that of a directory', async (t) => {
  for (const path of ['/', 'new/', 'new//', 'new/.', 'new/./']) t.ok(namesDirectory(path), path);
  for (const path of ['', 'new', './new', 'new/davit.', 'new/..davit']) t.notOk(namesDirectory(path), path);
});

t.test('a path means what the system takes it for, also with .. after a link', async (t) => {
  const directory = temporaryDirectory(t);
  mkdirSync(join(directory, 'elsewhere/inner'), { recursive: true });
  symlinkSync('elsewhere/inner', join(directory, 'link'));
  const [path, file] = [`${directory}/link/../davit.db`, join(directory, 'elsewhere/davit.db')];
  t.equal(realPath(path), file, 'before the file exists');
  symlinkSync('link/../davit.db', join(directory, 'linked.db'));
  t.equal(realPath(join(directory, 'linked.db')), file, 'through a link that says so');
  writeFileSync(file, '');
  for (const there of [path, join(directory, 'linked.db'), absolutePath(path)])
    t.equal(realPath(there), file);
  t.equal(realPath(`${directory}/missing/davit.db`), `${directory}/missing/davit.db`);
});
