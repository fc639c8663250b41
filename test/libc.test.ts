import t from 'tap';
import { loadCLibrary } from '../src/libc.ts';

t.test('the functions of the C library are called, and say why they fail', async (t) => {
  const { declare, lastError } = await loadCLibrary();
  t.equal(declare('int getpid()')(), process.pid);
  t.equal(declare('int close(int descriptor)')(-1), -1);
  t.equal(lastError(), 'EBADF');
});
