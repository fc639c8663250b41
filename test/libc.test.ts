import t from 'tap';
import { loadCLibrary } from '../src/libc.ts';

t.test('functions of the C library can be called, and lastError says why one failed', async (t) => {
  const { declare, lastError } = await loadCLibrary();
  t.equal(declare('int getpid()')(), process.pid);
  const result = declare('int close(int descriptor)')(-1);
  const error = lastError(); // at once, as any other call may change it, those of an assertion too
  t.strictSame({ result, error }, { result: -1, error: 'EBADF' });
});
