import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { executablePath } from '../helpers/executable.ts';
import { ifHas } from '../helpers/programs.ts';

const ROOT = join(import.meta.dirname, '../..');

t.test('quickstart --once shows the main job, and leaves what another one made', ifHas('git'), async (t) => {
  executablePath();
  const folder = join(ROOT, 'build/quickstart');
  const kept = join(folder, `kept-${process.pid}`);
  mkdirSync(folder, { recursive: true });
  writeFileSync(kept, '');
  t.teardown(() => rmSync(kept, { force: true }));
  const { status, stdout } = spawnSync(process.execPath, [join(ROOT, 'scripts/quickstart.ts'), '--once'], {
    encoding: 'utf8',
  });
  t.match({ status, stdout }, { status: 0, stdout: /deployment\.succeeded/ });
  t.ok(existsSync(kept));
});
