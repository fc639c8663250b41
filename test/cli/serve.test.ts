import { spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  copyFileSync,
  existsSync,
  linkSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { text } from 'node:stream/consumers';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { version } from '../../src/assets.ts';
import type { Key } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { SCHEMA_VERSION } from '../../src/store/database.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { openStore } from '../../src/store/store.ts';
import { COMPILE_CACHE, MAIN, place, runProcess } from '../helpers/cli.ts';
import { collected } from '../helpers/collected.ts';
import { untilFile } from '../helpers/deploy-client.ts';
import { listening } from '../helpers/listening.ts';
import { mountinfoLine } from '../helpers/mounts.ts';
import { ifMayUnshare, runInNamespace } from '../helpers/namespaces.ts';
import { serveWithLog, spawnServe } from '../helpers/served.ts';
import { ifMayMount, onSmallDisk } from '../helpers/small-disk.ts';
import { newDeployment } from '../helpers/store.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');

t.test('serve says where it listens, and stops cleanly on SIGTERM and SIGINT', async (t) => {
  for (const signal of ['SIGTERM', 'SIGINT'] as const) {
    const { directory, dbPath } = place(t);
    const service = await serve(t, directory);
    const { status, body } = await fetch(`${service.url}/healthz`);
    await body?.cancel();
    t.equal(status, 200);
    service.kill(signal);
    t.match(await service.ended, {
      exitCode: 0,
      signal: null,
      stdout: `davit listening on ${service.url}\n`,
    });
    t.ok(existsSync(dbPath));
    t.notOk(existsSync(`${dbPath}-wal`), 'a clean stop leaves no WAL');
  }
});

t.test('the process is called davit, and keeps its arguments', async (t) => {
  const { directory } = place(t);
  const { processId } = await serve(t, directory);
  t.equal(readFileSync(`/proc/${processId}/comm`, 'utf8'), 'davit\n');
  const words = readFileSync(`/proc/${processId}/cmdline`, 'utf8').split('\0');
  t.strictSame(words.slice(0, 4), [process.execPath, MAIN, 'serve', '--listen']);
});

t.test('serve listens at a host name, also for metrics, and is ready', async (t) => {
  const { directory } = place(t);
  const service = await serve(t, directory, { DAVIT_METRICS_LISTEN: 'localhost:0' }, 'localhost:0');
  t.match(service.url, /^http:\/\/localhost:\d+$/);
  const { status, body } = await fetch(`${service.url}/readyz`);
  await body?.cancel();
  t.equal(status, 200);
  service.kill('SIGTERM');
  t.match(await service.ended, { exitCode: 0, signal: null });
});

t.test('the working directory of davit may be removed: it leaves that, with all its paths', async (t) => {
  const { davit, directory, dbPath } = place(t);
  copyFileSync(join(FIXTURES, 'localhost.pem'), join(directory, 'cert.pem'));
  copyFileSync(join(FIXTURES, 'localhost.key'), join(directory, 'key.pem'));
  mkdirSync(join(directory, 'tmp'));
  const relative = { DAVIT_TLS_CERT: 'cert.pem', DAVIT_TLS_KEY: 'key.pem', TMPDIR: 'tmp' };
  const service = await serve(t, directory, { ...relative, DAVIT_WEBHOOK_CA_FILE: './cert.pem' });
  t.equal(readlinkSync(`/proc/${service.processId}/cwd`), '/');
  const command = ['sh', '-c', 'touch "$TMPDIR/started"'];
  const { stdout: projectId } = await davit([
    'admin',
    'project',
    'create',
    '--name',
    'site',
    '--',
    ...command,
  ]);
  const started = untilFile(join(directory, 'tmp'), 'started');
  await queue(dbPath, projectId.trim());
  await started;
});

t.test('keys and projects that admin changes count from the next request on', async (t) => {
  const { directory, json, davit } = place(t);
  const service = await serve(t, directory);
  const key = await json<Key & { secret: string }>([
    'admin',
    'key',
    'create',
    '--name',
    'ci',
    '--all-scopes',
    '--all-projects',
  ]);
  const made = await davit(['admin', 'project', 'create', '--name', 'website']);
  const projects = (secret: string) =>
    fetch(`${service.url}/v2/projects`, { headers: { authorization: `Bearer ${secret}` } });

  const seen = await projects(key.secret);
  t.equal(seen.status, 200);
  t.match(await seen.json(), { data: [{ id: made.stdout.trim(), name: 'website', status: 'active' }] });
  const { secret } = await json<{ secret: string }>(['admin', 'key', 'rotate', 'ci']);
  t.equal((await projects(key.secret)).status, 401);
  t.equal((await projects(secret)).status, 200);
  await davit(['admin', 'key', 'revoke', 'ci', '--yes']);
  t.equal((await projects(secret)).status, 401);
});

t.test('options can come from variables, TLS among them', async (t) => {
  const { directory } = place(t);
  const service = await serve(t, directory, {
    DAVIT_TLS_CERT: join(FIXTURES, 'localhost.pem'),
    DAVIT_TLS_KEY: join(FIXTURES, 'localhost.key'),
  });
  t.match(service.url, /^https:\/\/127\.0\.0\.1:\d+$/);
});

t.test('the log says where metrics are served, and stdout only where davit listens', async (t) => {
  const { directory } = place(t);
  const child = spawnServe(t, directory, 'pipe', {}, ['--metrics-listen', '127.0.0.1:0']);
  t.teardown(() => child.kill('SIGKILL'));
  const [stdout, stderr] = [child.stdout, child.stderr].map((stream) => stream && text(stream));
  if (child.stdout !== null) await once(child.stdout, 'readable');
  child.kill('SIGTERM');
  t.match(await stdout, /^davit listening on \S+\n$/);
  const lines = String(await stderr)
    .split('\n')
    .filter((line) => line.includes('metrics are served'));
  t.match(
    lines.map((line) => JSON.parse(line)),
    [{ url: /^http:\/\/127\.0\.0\.1:[1-9]\d*\/metrics$/ }],
  );
});

t.test('the log says that the file was created, as a forgotten --db would create another', async (t) => {
  const { directory, dbPath } = place(t);
  const message = 'created the file: it has no keys and no projects yet';
  const first = await serveWithLog(t, directory);
  t.match(await first.logged(message), { level: 'info', file: dbPath });
  await first.stop();
  const second = await serveWithLog(t, directory);
  await second.stop();
  t.notMatch(second.stderr(), message);
});

t.test(
  'the log says which davit started on which file, and what still runs when it begins to stop',
  async (t) => {
    const { directory, dbPath, davit } = place(t);
    const service = await serveWithLog(t, directory);
    const { level, file, ...started } = await service.logged('started');
    t.match({ level, file }, { level: 'info', file: dbPath });
    t.match(started, { version, schema_version: SCHEMA_VERSION });
    const command = ['sh', '-c', 'until [ -e stop ]; do sleep 0.01; done'];
    const made = await davit([
      'admin',
      'project',
      'create',
      '--name',
      'slow',
      '--dir',
      '.',
      '--',
      ...command,
    ]);
    await queue(dbPath, made.stdout.trim());
    await service.logged('deployment started');
    const stopped = service.stop();
    t.match(await service.logged('stopping'), { level: 'info', running_deployments: 1, grace_ms: 25_000 });
    writeFileSync(join(directory, 'stop'), '');
    t.equal(await stopped, 0);
  },
);

t.test('the log warns of a file that is open to others, and davit leaves its mode as it is', async (t) => {
  const { directory, dbPath, davit } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website', '--', '/bin/true']);
  chmodSync(dbPath, 0o644);
  const service = await serveWithLog(t, directory);
  t.match(await service.logged(/others have access/), {
    level: 'warn',
    msg: `others have access to davit.db (mode 644): stop davit, chmod 600 ${dbPath}, and start it again`,
  });
  await service.stop();
  t.equal(statSync(dbPath).mode & 0o777, 0o644);
  chmodSync(dbPath, 0o600);
  const second = await serveWithLog(t, directory);
  for (const side of ['-wal', '-shm']) t.equal(statSync(dbPath + side).mode & 0o777, 0o600);
  await second.stop();
  t.notMatch(second.stderr(), 'others have access');
});

t.test('the log warns of a DAVIT_ variable with a misspelt name', async (t) => {
  const { directory } = place(t);
  const service = await serveWithLog(t, directory, {
    env: {
      DAVIT_RETENTON: 'off',
      DAVIT_LOG_LEVEL: 'info',
      DAVIT_KEY: 'davit_x',
      DAVIT_URL: 'http://127.0.0.1:1',
    },
  });
  await service.logged(/DAVIT_/);
  t.match(
    service.log().filter(({ level }) => level === 'warn'),
    [{ msg: 'DAVIT_RETENTON is no variable of davit serve: did you mean DAVIT_RETENTION?' }],
  );
});

t.test(
  'serve says that what stdout should say is lost, and goes on',
  existsSync('/dev/full') ? {} : { skip: 'needs /dev/full' },
  async (t) => {
    const { directory } = place(t);
    const words = [process.execPath, MAIN, 'serve', '--listen', '127.0.0.1:0'];
    const child = spawn('sh', ['-c', 'exec "$0" "$@" >/dev/full', ...words], {
      cwd: directory,
      env: COMPILE_CACHE,
      stdio: ['ignore', 'ignore', 'pipe'],
    });
    t.teardown(() => child.kill('SIGKILL'));
    const ended = once(child, 'exit');
    const lost: string[] = [];
    for await (const line of createInterface({ input: child.stderr })) {
      if (!line.includes('lost')) continue;
      lost.push(line);
      child.kill('SIGTERM');
    }
    t.match(lost, [/^error: the output is lost: ENOSPC/]);
    t.strictSame(await ended, [0, null]);
  },
);

t.test('a second signal ends serve at once', async (t) => {
  const { directory, dbPath, davit } = place(t);
  const service = await serve(t, directory);
  // A service that is told to stop waits for it; alone, it ends by itself.
  const command = ['sh', '-c', 'touch started; exec sleep 30'];
  const made = await davit(['admin', 'project', 'create', '--name', 'slow', '--dir', '.', '--', ...command]);
  const started = untilFile(directory, 'started');
  await queue(dbPath, made.stdout.trim());
  await started;
  service.kill('SIGTERM');
  await untilStopping(service.url);
  // Some time after the first: what comes with it is the same.
  const again = setInterval(() => service.kill('SIGINT'), 20);
  t.teardown(() => clearInterval(again));
  t.match(await service.ended, { exitCode: 130, signal: null });
});

t.test('two signals in immediate succession count as one', async (t) => {
  const { directory, dbPath } = place(t);
  const service = await serve(t, directory);
  // Stopped meanwhile, it gets both at once, however long this process is held up in between.
  for (const signal of ['SIGSTOP', 'SIGTERM', 'SIGINT', 'SIGCONT'] as const) service.kill(signal);
  t.match(await service.ended, { exitCode: 0, signal: null });
  t.notOk(existsSync(`${dbPath}-wal`));
});

t.test('SIGUSR1 does not open a debugger', async (t) => {
  const service = await serveWithLog(t, place(t).directory);
  service.signal('SIGUSR1');
  t.equal((await fetch(`${service.url}/healthz`)).status, 200);
  t.equal(await service.stop(), 0);
  t.notMatch(service.stderr(), /debug/i);
});

t.test('each cause that keeps serve from starting is one line that says what to do', async (t) => {
  const { refused, directory } = place(t, runProcess);
  const other = place(t, runProcess);
  writeFileSync(join(other.directory, 'garbage.pem'), 'garbage');
  const service = await serve(t, directory);
  const { port } = new URL(service.url);
  const cert = join(FIXTURES, 'localhost.pem');
  const refusals = await Promise.all([
    refused(['serve', '--listen', '127.0.0.1:0']),
    other.davit(['serve', '--listen', `127.0.0.1:${port}`]),
    other.davit(['serve', '--listen', '203.0.113.7:8080', '--db', 'another.db']),
    other.davit(['serve', '--tls-cert', cert, '--tls-key', join(FIXTURES, 'wrong-host.key')]),
    other.davit(['serve', '--tls-cert', 'garbage.pem', '--tls-key', 'garbage.pem']),
    other.davit(['serve', '--webhook-ca-file', 'missing.pem']),
    other.davit([
      'serve',
      '--listen',
      '127.0.0.1:0',
      '--metrics-listen',
      `127.0.0.1:${port}`,
      '--db',
      'third.db',
    ]),
    other.davit(['serve', '--listen', '127.0.0.1:9464', '--metrics-listen', '127.0.0.1:9464']),
  ]);
  t.match(refusals, [
    { exitCode: 1, message: /davit\.db is served already by process \d+ since .*stop that one first/ },
    {
      exitCode: 1,
      stderr: new RegExp(
        `^error: cannot listen on 127\\.0\\.0\\.1:${port} \\(EADDRINUSE\\): choose another place with --listen\n$`,
      ),
    },
    { exitCode: 1, stderr: /^error: cannot listen on 203\.0\.113\.7:8080 \(EADDRNOTAVAIL\).*--listen\n$/ },
    {
      exitCode: 1,
      stderr:
        /^error: --tls-key: .*wrong-host\.key is not the key of the first certificate in .*localhost\.pem: .*\n$/,
    },
    { exitCode: 1, stderr: /^error: --tls-cert: \/.*\/garbage\.pem holds no certificate in PEM\n$/ },
    {
      exitCode: 1,
      stderr: /^error: --webhook-ca-file: \/.*\/missing\.pem cannot be read \(ENOENT\): check .*\n$/,
    },
    {
      exitCode: 1,
      stderr: new RegExp(
        `^error: cannot listen on 127\\.0\\.0\\.1:${port} \\(EADDRINUSE\\): choose another place with --metrics-listen\n$`,
      ),
    },
    { exitCode: 2, stderr: /^error: --listen and --metrics-listen are the same place: choose another port/ },
  ]);
});

t.test('a served file is refused under any other hard link, and usable under its own name', async (t) => {
  const { davit, directory, dbPath } = place(t, runProcess);
  const service = await serve(t, directory);
  const another = join(directory, 'another.db');
  linkSync(dbPath, another);
  const refusal = {
    exitCode: 1,
    stdout: '',
    stderr: new RegExp(
      `^error: (?:/.*/)?another\\.db has another name too, a hard link, and process ${service.processId} has the file open: .*\n$`,
    ),
  };
  t.match(await davit(['serve', '--listen', '127.0.0.1:0', '--db', 'another.db']), refusal);
  t.match(await davit(['admin', 'project', 'create', '--name', 'site', '--db', 'another.db']), refusal);
  t.match(
    await davit(['backup', '--db', 'another.db', 'copy.db']),
    refusal,
    'a copy would lack the latest writes',
  );
  t.match(await davit(['admin', 'project', 'create', '--name', 'site']), { exitCode: 0 });
  t.match(await davit(['backup', 'copy.db']), { exitCode: 0 });
  service.kill('SIGTERM');
  await service.ended;

  t.match(await davit(['admin', 'project', 'show', 'site', '--db', 'another.db']), { exitCode: 0 });
  const next = await serve(t, directory, { DAVIT_DB: 'another.db' });
  next.kill('SIGTERM');
  t.match(await next.ended, { exitCode: 0 }, 'without a service, another name is harmless');
  rmSync(another);
});

t.test('a file that is a mount point of its own is refused and left unchanged', ifMayMount, async (t) => {
  const { davit, directory, dump } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'site']);
  mkdirSync(join(directory, 'mounted'));
  const before = dump();
  const mounted = "'mounted/a b.db'";
  const { stdout, stderr } = await onSmallDisk(directory, 'mounted', '4m', [
    `touch ${mounted} && mount --bind davit.db ${mounted}`,
    `"$0" "$1" serve --listen 127.0.0.1:0 --db ${mounted}; echo "exit $?"`,
    `"$0" "$1" admin project create --name other --db ${mounted}; echo "exit $?"`,
    `"$0" "$1" backup --db ${mounted} copy.db; echo "exit $?"`,
    'ls mounted',
  ]);
  t.equal(stdout, 'exit 1\nexit 1\nexit 1\na b.db\n');
  const refusal =
    'error: (?:/.*/)?mounted/a b.db is mounted by itself, .*: mount the directory that it is in\n';
  t.match(stderr, new RegExp(`^(?:${refusal}){3}$`));
  t.strictSame(dump(), before);
});

t.test(
  'after a clean stop beside a process that has the file open, the file alone has everything',
  async (t) => {
    const { davit, directory, dbPath } = place(t);
    const service = await serveWithLog(t, directory);
    await davit(['admin', 'project', 'create', '--name', 'site']);
    const other = new Sqlite(dbPath);
    t.equal(other.prepare('SELECT count(*) FROM projects').pluck().get(), 1);
    t.equal(await service.stop(), 0);
    t.match(service.log().at(-1), {
      level: 'info',
      msg: /^the -wal stays, .*: keep them together/,
    });
    copyFileSync(dbPath, join(directory, 'alone.db'));
    t.match(await davit(['admin', 'project', 'show', 'site', '--db', 'alone.db']), { exitCode: 0 });
    other.close();
  },
);

t.test(
  'a stop writes nothing into a file that was moved and that another program has changed since',
  async (t) => {
    const { davit, directory, dbPath } = place(t);
    const service = await serveWithLog(t, directory);
    for (let index = 0; index < 12; index += 1) {
      const env = `LONG=${'x'.repeat(5_000)}`;
      t.match(await davit(['admin', 'project', 'create', '--name', `site-${index}`, '--env', env]), {
        exitCode: 0,
      });
    }
    const moved = join(directory, 'moved.db');
    renameSync(dbPath, moved);
    const other = new Sqlite(moved);
    const integrity = () => other.pragma('integrity_check', { simple: true });
    t.equal(integrity(), 'ok');
    other.exec('CREATE TABLE others (text TEXT)');
    const insert = other.prepare('INSERT INTO others (text) VALUES (?)');
    for (let row = 0; row < 60; row += 1) insert.run('y'.repeat(3_000));
    other.close();
    t.equal(await service.stop(), 0);
    const again = new Sqlite(moved);
    t.equal(again.pragma('integrity_check', { simple: true }), 'ok');
    t.equal(again.prepare('SELECT count(*) FROM others').pluck().get(), 60);
    again.close();
  },
);

t.test('a start on a disk without room, or without room for more files, says so', ifMayMount, async (t) => {
  const { directory } = place(t);
  mkdirSync(join(directory, 'small'));
  const start = '"$0" "$1" serve --listen 127.0.0.1:0 --log-level silent --db small/davit.db; echo "exit $?"';
  const { stdout, stderr } = await onSmallDisk(directory, 'small', '8m,nr_inodes=20', [
    '"$0" "$1" admin project create --name website --db small/davit.db >/dev/null 2>&1',
    'touch small/davit.db-lock; touch $(seq -f small/%g 20) 2>/dev/null',
    start,
    'rm small/?; cat /dev/zero 2>/dev/null >small/0',
    start,
    'rm small/0; "$0" "$1" admin project list --db small/davit.db | tail -n 1',
  ]);
  t.match(stdout, /^exit 1\nexit 1\nprj_\w+ +website /);
  const [noFiles = '', full = '', ...more] = stderr.split('\n');
  t.match(noFiles, /^error: cannot use .+: its disk has no room for further files \(inodes\), /);
  t.match(full, /^error: cannot use .+: its disk is full: make room$/);
  t.strictSame(more, ['']);
});

t.test(
  'a file on a network file system is served with a warning, and doctor notes it',
  ifMayMount,
  async (t) => {
    const { davit, directory } = place(t);
    await davit(['admin', 'project', 'create', '--name', 'site']);
    for (const type of ['nfs4', 'fuse.sshfs', 'ext4', 'fuse.mergerfs'])
      writeFileSync(join(directory, type), mountinfoLine(directory, type));
    const claimingToBe = (type: string, words: string) =>
      `sh -c 'mount --bind ${type} /proc/$$/mountinfo && exec "$0" "$@"' "$0" "$1" ${words}`;
    // It starts, and fails once it has warned, as there is no such address.
    const start = 'serve --listen 192.0.2.1:1';
    const { stdout, stderr } = await onSmallDisk(directory, '/mnt', '4m', [
      claimingToBe('nfs4', start),
      claimingToBe('fuse.sshfs', 'doctor --json'),
      claimingToBe('ext4', start),
      claimingToBe('fuse.mergerfs', 'doctor --json'),
    ]);
    const warnings = stderr.split('\n').filter((line) => line.includes('"warn"'));
    t.match(
      warnings.map((line) => JSON.parse(line).msg),
      [/^the file is on a network file system \(nfs4\): .*: keep it on a local disk, /],
    );
    t.equal(warnings.length, 1);
    const [shared, local] = stdout
      .split(/^(?=\{)/m)
      .map((report) =>
        JSON.parse(report).findings.filter(({ check }: { check: string }) => check === 'disk'),
      );
    t.match(shared, [
      {},
      { level: 'note', message: /network file system \(fuse\.sshfs\)/, advice: /^keep it on a / },
    ]);
    t.equal(local.length, 1);
  },
);

t.test('a file that another machine serves is refused and left unchanged', ifMayUnshare, async (t) => {
  const { davit, directory, dbPath } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'site']);
  lockForServing(dbPath, 4711, realEffects)();
  const elsewhere = new Sqlite(`${dbPath}-lock`);
  elsewhere.exec("UPDATE holder SET boot_id = 'b7e3bd5c-0000-4000-8000-000000000000'; BEGIN IMMEDIATE");
  t.teardown(() => elsewhere.close());
  const before = [readFileSync(dbPath), readdirSync(directory)];
  const commands = [
    ['serve', '--listen', '127.0.0.1:0'],
    ['admin', 'project', 'create', '--name', 'other'],
    ['admin', 'queue'],
    ['admin', 'migrate'],
    ['backup', join(directory, 'copy.db')],
    ['doctor'],
  ];
  for (const words of commands) {
    // The process that holds the lock is not visible there.
    const { status, stdout, stderr } = runInNamespace(process.execPath, MAIN, ...words, '--db', dbPath);
    t.match({ status, stdout }, { status: 1, stdout: '' }, words.join(' '));
    t.match(
      stderr,
      /^error: \/.*davit\.db is served by process 4711 since \S+ on another machine: run davit there/,
    );
  }
  t.strictSame([readFileSync(dbPath), readdirSync(directory)], before);
});

/** `davit serve` in this directory, ready. */
async function serve(t: Test, directory: string, env: Record<string, string> = {}, listen = '127.0.0.1:0') {
  const child = spawnServe(t, directory, 'inherit', env, ['--listen', listen, '--log-level', 'silent']);
  const printed = collected(child);
  const ended = once(child, 'close').then(([exitCode, signal]) => ({
    exitCode,
    signal,
    stdout: printed.text(),
  }));
  return { ...(await listening(t, child)), ended, kill: (signal: NodeJS.Signals) => child.kill(signal) };
}

/** As the API would. */
async function queue(dbPath: string, projectId: string): Promise<void> {
  const store = openStore(dbPath, realEffects);
  const { id } = store.reads.projects.resolve(projectId);
  await store.writer.write('deployments.create', newDeployment(id));
  await store.close();
}

async function untilStopping(url: string): Promise<void> {
  for (;;) {
    const { status, body } = await fetch(`${url}/readyz`);
    await body?.cancel();
    if (status === 503) return;
  }
}
