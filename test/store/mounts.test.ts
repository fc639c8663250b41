import { spawnSync } from 'node:child_process';
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import t from 'tap';
import { ifMayMount } from '../helpers/small-disk.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const MOUNTS = pathToFileURL(join(import.meta.dirname, '../../src/store/mounts.ts')).href;

t.test('a mount that another one hides says nothing of noexec', ifMayMount, async (t) => {
  const directory = temporaryDirectory(t);
  mkdirSync(join(directory, 'upper/lower'), { recursive: true });
  const cases: [mounts: string, isNoexec: boolean][] = [
    ['mount -t tmpfs -o noexec none upper/lower', true],
    ['mount -t tmpfs -o noexec none upper', true],
    ['mount -t tmpfs -o noexec none upper && mkdir upper/lower && mount -t tmpfs none upper/lower', false],
    ['mount -t tmpfs -o noexec none upper/lower && mount -t tmpfs none upper/lower', false],
    ['mount -t tmpfs none upper/lower && mount -t tmpfs -o noexec none upper/lower', true],
    ['mount -t tmpfs -o noexec none upper/lower && mount -t tmpfs none upper', false],
    ['mount -t tmpfs none upper/lower && mount -t tmpfs -o noexec none upper', true],
  ];
  const look = `
    const { isOnNoexec } = await import(${JSON.stringify(MOUNTS)});
    console.log(isOnNoexec('upper/lower/tool'));`;
  for (const [mounts, isNoexec] of cases) {
    const script = `${mounts} && mkdir -p upper/lower && touch upper/lower/tool && exec "$@"`;
    const node = [process.execPath, '--input-type=module', '--eval', look];
    const { stdout } = spawnSync('unshare', ['-rm', 'sh', '-c', script, 'sh', ...node], {
      cwd: directory,
      encoding: 'utf8',
    });
    t.equal(stdout, `${isNoexec}\n`, mounts);
  }
});
