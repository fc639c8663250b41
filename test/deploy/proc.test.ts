import { openSync } from 'node:fs';
import t from 'tap';
import { processIds, readProc } from '../../src/deploy/proc.ts';
import { useUpFiles } from '../helpers/limits.ts';
import { ifHas } from '../helpers/programs.ts';

t.test('all processes are named, and what /proc says of them is read', async (t) => {
  t.ok(processIds().includes(process.pid));
  t.ok(processIds().every(Number.isInteger));
  t.match(readProc('/proc/self/stat'), new RegExp(`^${process.pid} `));
  t.equal(readProc('/proc/0/stat'), undefined, 'nobody is there');
  t.throws(() => readProc('/proc'), { code: 'EISDIR' });
});

t.test('where no more files may be open nobody looks gone', ifHas('prlimit'), async (t) => {
  t.ok(processIds().includes(process.pid));
  const release = useUpFiles();
  try {
    for (let look = 0; look < 3; look++) {
      t.throws(() => openSync('/dev/null', 'r'), { code: 'EMFILE' });
      t.ok(processIds().includes(process.pid));
      t.match(readProc('/proc/self/stat'), new RegExp(`^${process.pid} `));
    }
  } finally {
    release();
  }
});
