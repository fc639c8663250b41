import { execFileSync } from 'node:child_process';
import { join } from 'node:path';
import t from 'tap';

const ROOT = join(import.meta.dirname, '../..');

t.test('a davit that is slow to start may collect garbage before its code is recorded', async (t) => {
  const collects =
    "import { collectGarbage } from './src/memory.ts'; collectGarbage(); console.log('goes on');";
  const writer = '--require=./scripts/write-code.cjs';
  const output = execFileSync(process.execPath, [writer, '--input-type=module', '--eval', collects], {
    cwd: ROOT,
    encoding: 'utf8',
  });
  t.equal(output, 'goes on\n');
});
