import { closeSync, constants, openSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { posix } from '../helpers/commands.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a file that somebody writes to is told from one that is only read', (t) => {
  const path = join(temporaryDirectory(t), 'file');
  writeFileSync(path, '');
  const writer = openSync(path, 'a');
  const reader = openSync(path, 'r');
  t.equal(posix.isOpenForWriting(reader), true);
  closeSync(writer);
  const other = openSync(path, 'r');
  t.equal(posix.isOpenForWriting(reader), false);
  closeSync(other);

  // By then it holds a lease: the system tells this process that somebody wants to write, and that ends it not.
  t.throws(() => openSync(path, constants.O_WRONLY | constants.O_NONBLOCK), { code: 'EAGAIN' });
  closeSync(reader);
  closeSync(openSync(path, constants.O_WRONLY | constants.O_NONBLOCK));
  t.end();
});

t.test('where it cannot be known it is taken for written to', (t) => {
  const directory = openSync(temporaryDirectory(t), 'r');
  t.equal(posix.isOpenForWriting(directory), true);
  closeSync(directory);
  t.end();
});
