import { resolve } from 'node:path';
import t from 'tap';
import { absolutePath } from '../src/paths.ts';

t.test('an absolute path is as short as it can be without another meaning', async (t) => {
  for (const path of ['davit.db', './davit.db', '../davit.db', '.././davit.db', '/tmp//davit.db', '..'])
    t.equal(absolutePath(path), resolve(path));
  t.equal(absolutePath('a/../davit.db'), `${process.cwd()}/a/../davit.db`);
  t.equal(absolutePath('./a/./..'), `${process.cwd()}/./a/./..`);
  t.equal(absolutePath('/a/../davit.db'), '/a/../davit.db');
});
