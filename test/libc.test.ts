import t from 'tap';
import { loadCLibrary } from '../src/libc.ts';

t.test('functions of the C library can be called, and lastError says why one failed', async (t) => {
  const { declare, lastError } = await loadCLibrary();
  t.equal(declare('int getpid()')(), process.pid);
  t.equal(declare('int close(int descriptor)')(-1), -1);
  t.equal(lastError(), 'EBADF');
});
