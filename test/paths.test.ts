import { resolve } from 'node:path';
import t from 'tap';
import { absolutePath, namesDirectory } from '../src/paths.ts';

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
