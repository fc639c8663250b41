import { execFile } from 'node:child_process';
import { existsSync, mkdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import t from 'tap';
import { executablePath } from '../helpers/executable.ts';
import { ifHas } from '../helpers/programs.ts';

const ROOT = join(import.meta.dirname, '../..');

t.test('quickstart --once shows the main job, and leaves what others make', ifHas('git'), async (t) => {
  executablePath();
  const folder = join(ROOT, 'build/quickstart');
  const kept = join(folder, `kept-${process.pid}`);
  mkdirSync(folder, { recursive: true });
  writeFileSync(kept, '');
  t.teardown(() => rmSync(kept, { force: true }));
  const run = () => promisify(execFile)(process.execPath, [join(ROOT, 'scripts/quickstart.ts'), '--once']);
  for (const { stdout } of await Promise.all([run(), run()])) {
    t.match(stdout, /deployment\.succeeded/);
    const [, own = '/'] = /^ {2}(\/.*)\/hello\.git: /m.exec(stdout) ?? [];
    t.notOk(existsSync(own), 'its own is removed');
  }
  t.ok(existsSync(kept));
});
