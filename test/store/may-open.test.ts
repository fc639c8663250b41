import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, copyFileSync, existsSync, openSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { type Serving, servedBy } from '../../src/store/holder.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { refuseRemoved, refuseToServe } from '../../src/store/may-open.ts';
import { lockPath } from '../../src/store/place.ts';
import type { ProjectDetails } from '../../src/store/projects.ts';
import { place, runHere } from '../helpers/cli.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { opened, serve } from '../helpers/served.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const WAYS = {
  removed: (file: string) => rmSync(file),
  moved: (file: string) => renameSync(file, `${file}.elsewhere`),
  'moved, and another file put in its place': (file: string) => {
    renameSync(file, `${file}.elsewhere`);
    copyFileSync(`${file}.elsewhere`, file);
  },
};

for (const [side, way] of [
  ['', 'moved, and another file put in its place'],
  ['-wal', 'removed'],
  ['-shm', 'removed'],
  ['-shm', 'moved'],
] as const) {
  t.test(`while davit.db${side} of a service is ${way}, every other command refuses the file`, async (t) => {
    const { davit, json, dump, dbPath, directory } = place(t);
    const service = await serve(t, directory);
    await davit(['admin', 'project', 'create', '--name', 'website']);
    await opened(service);
    WAYS[way](dbPath + side);
    const message = new RegExp(
      `^error: /.*/davit\\.db${side} was moved, removed or replaced while process ${service.processId} serves .*: stop that one first`,
    );
    const commands = [
      ['admin', 'project', 'create', '--name', 'lost'],
      ['admin', 'project', 'list'],
      ['backup', 'copy.db'],
      ['doctor'],
    ];
    // Time flies while they look again, as the service might be starting or stopping.
    const { monotonicMs, advance } = fakeEffects();
    const effects = { ...realEffects, monotonicMs, block: () => advance(2_000) };
    for (const words of commands) {
      const { exitCode, stdout, stderr } = await runHere(words, { cwd: directory, effects });
      t.match({ exitCode, stdout, stderr }, { exitCode: 1, stdout: '', stderr: message });
    }
    await service.stop();
    t.match(dump()['projects'], [{ name: 'website' }]);
    t.match(await json<ProjectDetails[]>(['admin', 'project', 'list']), [{ name: 'website' }]);
  });
}

t.test('a service that removes the -shm at its stop, and closes it later, has lost nothing', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  // In place of the service, whose stop waits for no test between the two.
  const release = lockForServing(path, process.pid, realEffects);
  const opened = ['', '-wal', '-shm'].map((side) => openSync(path + side, 'w'));
  rmSync(`${path}-shm`);
  const stop = () => {
    for (const descriptor of opened.splice(0)) closeSync(descriptor);
    release();
  };
  t.doesNotThrow(() => refuseRemoved(path, { ...fakeEffects(), block: stop }));
  t.strictSame(opened, [], 'it was looked at again');
});

t.test('a file that was moved while a service has it open is refused by both names', async (t) => {
  const { davit, json, directory, dbPath } = place(t);
  const service = await serve(t, directory);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  await davit(['backup', 'earlier.db']);
  await opened(service);
  renameSync(dbPath, join(directory, 'moved.db'));
  const commands = [
    ['admin', 'project', 'create', '--name', 'lost'],
    ['admin', 'project', 'list'],
    ['backup', 'copy.db'],
    ['restore', 'earlier.db', '--yes'],
    ['doctor'],
    ['serve'],
  ];
  for (const words of commands) {
    t.match(await davit([...words, '--db', 'moved.db']), {
      exitCode: 1,
      stdout: '',
      stderr: new RegExp(
        `^error: \\S*moved\\.db was moved here while process ${service.processId} has it open, and a part of it is in \\S+/davit\\.db-wal: move it back to \\S+/davit\\.db\\n$`,
      ),
    });
  }
  t.match(await davit(['restore', 'moved.db', '--db', 'other.db']), {
    exitCode: 1,
    stderr: /^error: moved\.db was moved here while process/,
  });
  t.match(await davit(['admin', 'project', 'list']), {
    exitCode: 1,
    stderr:
      /^error: there is no file \.\/davit\.db, but its -wal is there, which holds a part of it: move the file back\n$/,
  });
  renameSync(join(directory, 'moved.db'), dbPath);
  t.match(await davit(['admin', 'project', 'create', '--name', 'later']), { exitCode: 0 });
  await service.stop();
  t.match(await json<ProjectDetails[]>(['admin', 'project', 'list']), [
    { name: 'website' },
    { name: 'later' },
  ]);
});

t.test('a service whose lock file was removed is still found, as is what else is removed', async (t) => {
  const { davit, json, directory, dbPath } = place(t);
  const service = await serve(t, directory);
  await opened(service);
  rmSync(lockPath(dbPath));
  const { process_id } = (await json<{ service: Serving }>(['admin', 'queue'])).service;
  t.equal(process_id, service.processId);
  t.match(await davit(['doctor']), {
    exitCode: 1,
    stdout: new RegExp(
      `^service +problem +running as process ${process_id}, whose lock file was removed`,
      'm',
    ),
  });
  const release = lockForServing(dbPath, process.pid, realEffects); // as in another container
  const { stdout } = await davit(['doctor']);
  t.match(stdout, new RegExp(`running as process ${process_id}, whose lock`), 'not the one that has a lock');
  release();
  rmSync(lockPath(dbPath));
  rmSync(`${dbPath}-wal`);
  t.match(await davit(['admin', 'queue']), {
    exitCode: 1,
    stderr: /davit\.db-wal was moved, removed or replaced while process/,
  });
});

t.test('who had a file with the name of the lock, but has not the database, is no service', async (t) => {
  const { davit, dbPath } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  await davit(['backup', 'copy.db']);
  // In a mount namespace of its own, where the names are free, this is open to any user's process.
  const script = 'exec 9>"$0" && rm "$0" && echo ready && exec cat';
  const stranger = spawn('sh', ['-c', script, lockPath(dbPath)], { stdio: ['pipe', 'pipe', 'inherit'] });
  t.teardown(() => stranger.kill('SIGKILL'));
  await once(stranger.stdout, 'data');
  t.equal(servedBy(dbPath), null);
  t.doesNotThrow(() => refuseToServe(dbPath));
  t.match(await davit(['restore', 'copy.db', '--yes']), { exitCode: 0 });
});

t.test(
  'a second service is refused even if the lock file of the first was removed, until that has ended',
  async (t) => {
    const { davit, directory, dbPath } = place(t);
    const first = await serve(t, directory);
    await opened(first);
    rmSync(lockPath(dbPath));
    const refusal = {
      code: 'conflict',
      message: new RegExp(`is served already by process ${first.processId}, whose lock was removed`),
    };
    renameSync(`${dbPath}-shm`, `${dbPath}-shm.elsewhere`);
    t.throws(() => refuseToServe(dbPath), refusal, 'as if nobody had it open');
    renameSync(`${dbPath}-shm.elsewhere`, `${dbPath}-shm`);
    t.notOk(existsSync(lockPath(dbPath)));
    writeFileSync(lockPath(dbPath), ''); // as left by a command that was about to replace the file
    t.throws(() => refuseToServe(dbPath), refusal);
    t.match(await davit(['serve', '--listen', '127.0.0.1:0']), { exitCode: 1, stderr: refusal.message });
    t.equal(await first.stop(), 0);
    t.doesNotThrow(() => refuseToServe(dbPath));
  },
);
