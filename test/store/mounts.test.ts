import { spawnSync } from 'node:child_process';
import fs, { mkdirSync } from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import t from 'tap';
import { networkFileSystemOf } from '../../src/store/mounts.ts';
import { ifMayMount } from '../helpers/small-disk.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const MOUNTS = pathToFileURL(join(import.meta.dirname, '../../src/store/mounts.ts')).href;

t.test('the file system of a file is told from those with the same low bits of their numbers', async (t) => {
  const { statSync, readFileSync } = fs;
  t.teardown(() => {
    Object.assign(fs, { statSync, readFileSync });
    syncBuiltinESMExports();
  });
  // As makedev(3) puts them together.
  for (const [device, dev] of [
    ['0:44', 0x2c],
    ['0:300', 0x10002c],
    ['259:44', 0x1032c],
  ] as const) {
    const lines = ['0:44', '0:300', '259:44'].map((one) => {
      const type = one === device ? 'nfs4' : 'ext4';
      return `36 35 ${one} / /srv rw,relatime shared:1 - ${type} host:/srv rw\n`;
    });
    Object.assign(fs, { statSync: () => ({ dev }), readFileSync: () => lines.join('') });
    syncBuiltinESMExports();
    t.equal(networkFileSystemOf('/davit.db'), 'nfs4', device);
  }
});

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
