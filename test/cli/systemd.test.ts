import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, mkdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import t, { type Test } from 'tap';
import { COMPILE_CACHE, MAIN, place, run } from '../helpers/cli.ts';
import { KNOWS_OLDER_SCHEMAS, makeOlder } from '../helpers/older-schema.ts';
import { ifHas } from '../helpers/programs.ts';
import { serveWithLog } from '../helpers/served.ts';

t.test('the unit runs this executable on /var/lib/davit/davit.db', async (t) => {
  const { stdout, stderr, exitCode } = await run(['admin', 'systemd-unit']);
  t.equal(exitCode, 0);
  t.notMatch(stderr, /davit\.db/, 'the sources may be hidden from the unit, the file is not');
  const lines = unquoted(stdout).split('\n');
  for (const line of [
    `ExecStart=${process.execPath} ${MAIN} serve --db /var/lib/davit/davit.db`,
    'Type=notify',
    'NotifyAccess=all',
    'User=davit',
    'After=network-online.target time-sync.target',
    'StateDirectory=davit',
    'KillMode=mixed',
    'TimeoutStopSec=40',
    'OOMPolicy=continue',
    'ExecReload=/bin/kill -HUP $MAINPID',
    'RestartPreventExitStatus=2',
  ]) {
    t.ok(lines.includes(line), line);
  }
  t.match(stdout, /\/etc\/davit\.env .*but not DAVIT_DB: /);
  t.notMatch(stdout, /mkdir|^ReadWritePaths|^RequiresMountsFor/m, 'systemd makes its directory');
});

t.test('the unit takes --user and --db, quoted as systemd expects', async (t) => {
  const { stdout } = await run([
    'admin',
    'systemd-unit',
    '--user',
    'www-data',
    '--db',
    '/srv/my files/100%.db',
  ]);
  t.match(stdout, /^User=www-data$/m);
  t.match(stdout, /^ExecStart=.* serve --db "\/srv\/my files\/100%%\.db"$/m);
  t.match(stdout, /^ReadWritePaths="\/srv\/my files"$/m);
  t.match(stdout, /^RequiresMountsFor="\/srv\/my files"$/m);
  t.match(stdout, /^StateDirectory=davit$/m, 'commands have a home in any case');
  t.match(stdout, /^# {3}mkdir -m 700 \/srv\/my\\ files && chown www-data \/srv\/my\\ files {3}#/m);
  const dollar = await run(['admin', 'systemd-unit', '--db', '/srv/$a b/$c.db']);
  t.match(dollar.stdout, /^ExecStart=.* serve --db "\/srv\/\$\$a b\/\$\$c\.db"$/m);
  t.match(dollar.stdout, /^ReadWritePaths="\/srv\/\$a b"$/m, 'variables are only in command lines');
  const quotes = await run(['admin', 'systemd-unit', '--db', '/srv/a "b" \\c/davit.db']);
  t.match(
    quotes.stdout,
    /^ReadWritePaths="\/srv\/a \\"b\\" \\\\c"$/m,
    'neither ends it nor changes what follows',
  );
  const { directory, davit } = place(t);
  mkdirSync(join(directory, 'releases/42'), { recursive: true });
  symlinkSync('releases/42', join(directory, 'link'));
  const above = await davit(['admin', 'systemd-unit', '--db', 'link/../davit.db']);
  t.match(unquoted(above.stdout), ` serve --db ${directory}/link/../davit.db\n`);
  t.match(unquoted(above.stdout), `\nReadWritePaths=${directory}/releases\n`);
  for (const [dbPath, writable] of [
    ['/var/lib/davit/../other/davit.db', '/var/lib/other'],
    [`${directory}/none/../davit.db`, directory],
  ]) {
    const { stdout } = await davit(['admin', 'systemd-unit', '--db', dbPath ?? '']);
    t.match(unquoted(stdout), `\nReadWritePaths=${writable}\n`);
  }
  const here = ` serve --db ${directory}/davit.db\n`;
  const named = await davit(['admin', 'systemd-unit', '--db', './davit.db']);
  t.ok(unquoted(named.stdout).includes(here));
  const set = await davit(['admin', 'systemd-unit'], { env: { DAVIT_DB: './davit.db' } });
  t.ok(unquoted(set.stdout).includes(here));
  t.match(await run(['admin', 'systemd-unit', '--user', 'two words']), { exitCode: 2, stdout: '' });
});

t.test(
  'a path with a control character makes no unit, as it could end its line and begin a setting',
  async (t) => {
    const { directory, refused } = place(t);
    mkdirSync(join(directory, 'a\nExecStartPre=b'));
    symlinkSync('a\nExecStartPre=b', join(directory, 'link'));
    for (const path of ['/srv/a\nUser=root', '/srv/tab\t/davit.db', 'link/davit.db']) {
      t.match(await refused(['admin', 'systemd-unit', '--db', path]), {
        exitCode: 1,
        message: /^error: a unit file cannot hold the control characters of \S+\\x\S+: choose another path$/,
      });
    }
  },
);

/** Paths of this machine may need quotes, or not. */
function unquoted(unit: string): string {
  return unit.replaceAll('"', '').replaceAll('%%', '%');
}

t.test('paths that the sandbox of the unit hides are warned of, with advice', async (t) => {
  const cases: [dbPath: string, setting: string | null][] = [
    ['/home/me/davit.db', 'ProtectHome=yes'],
    // Others may not look there.
    ...(process.getuid?.() === 0 ? [['/root/davit.db', 'ProtectHome=yes'] as [string, string]] : []),
    ['/tmp/davit.db', 'PrivateTmp=yes'],
    ['/var/tmp/x/davit.db', 'PrivateTmp=yes'],
    ['/srv/home/tmp/davit.db', null],
    ['/homes/davit.db', null],
  ];
  for (const [dbPath, setting] of cases) {
    const { stdout, stderr, exitCode } = await run(['admin', 'systemd-unit', '--db', dbPath]);
    t.equal(exitCode, 0);
    t.match(stdout, /^\[Install\]$/m);
    const warnings = stderr.split('\n').filter((line) => line.includes(dbPath));
    const warning = `warning: ${setting} hides ${dbPath} from the unit: choose another place with --db, such as /var/lib/davit/davit.db`;
    t.strictSame(warnings, setting === null ? [] : [warning]);
  }
  const { stderr } = await run(['admin', 'systemd-unit']);
  for (const path of [process.execPath, MAIN].filter((one) => /^\/(?:home|root|tmp)\//.test(one))) {
    t.match(
      stderr,
      `hides ${path} from the unit: install davit as /usr/local/bin/davit, and have that print the unit\n`,
    );
  }
});

t.test('systemd-analyze accepts the unit and its exposure', ifHas('systemd-analyze'), async (t) => {
  const { davit, directory } = place(t);
  const path = join(directory, 'davit.service');
  const elsewhere = await davit(['admin', 'systemd-unit', '--db', '/srv/my files/100%.db']);
  writeFileSync(path, elsewhere.stdout);
  t.equal(spawnSync('systemd-analyze', ['verify', path], { encoding: 'utf8' }).stderr, '');
  const { stdout } = await davit(['admin', 'systemd-unit']);
  writeFileSync(path, stdout);
  const verified = spawnSync('systemd-analyze', ['verify', path], { encoding: 'utf8' });
  t.strictSame([verified.status, verified.stderr], [0, '']);
  const judged = spawnSync('systemd-analyze', ['security', '--offline=true', '--no-pager', path], {
    encoding: 'utf8',
  });
  const [, exposure] = /Overall exposure level for davit\.service: ([\d.]+)/.exec(judged.stdout) ?? [];
  t.ok(Number(exposure) < 2.5, `an exposure of ${exposure}`);
});

/** Systemd's end of the notify socket, in Python, as Node has no datagram Unix sockets. */
const LISTENER = `
import os, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(sys.argv[1])
print("bound", flush=True)
while True:
    data, ancillary, _, _ = s.recvmsg(4096, 1024)
    for level, kind, fds in ancillary:
        for n in range(0, len(fds), 4):
            os.close(int.from_bytes(fds[n:n + 4], sys.byteorder))
    print(data.decode().strip(), flush=True)
`;

/** A notify socket; `next` resolves once this message has come. */
async function startListening(t: Test, directory: string) {
  const NOTIFY_SOCKET = join(directory, 'notify');
  const systemd = spawn('python3', ['-c', LISTENER, NOTIFY_SOCKET], { stdio: ['ignore', 'pipe', 'inherit'] });
  t.teardown(() => systemd.kill('SIGKILL'));
  const lines = createInterface({ input: systemd.stdout })[Symbol.asyncIterator]();
  const next = async (wanted: string) => {
    for (;;) {
      const { value, done } = await lines.next();
      if (done === true) throw new Error(`${wanted} did not come`);
      if (value === wanted) return;
    }
  };
  await next('bound');
  chmodSync(NOTIFY_SOCKET, 0o777);
  return { NOTIFY_SOCKET, next };
}

const speaks = ifHas('systemd-notify', 'python3');

t.test('systemd is told when serve is ready and when it stops', speaks, async (t) => {
  const { directory } = place(t);
  const { NOTIFY_SOCKET, next } = await startListening(t, directory);
  const service = spawn(
    process.execPath,
    [MAIN, 'serve', '--listen', '127.0.0.1:0', '--log-level', 'error'],
    {
      cwd: directory,
      env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', NOTIFY_SOCKET },
      stdio: ['ignore', 'pipe', 'inherit'],
    },
  );
  t.teardown(() => service.kill('SIGKILL'));
  await next('READY=1');
  service.kill('SIGTERM');
  await next('STOPPING=1');
  t.strictSame(await once(service, 'exit'), [0, null]);
});

t.test('systemd is asked for more time during a migration', speaks, async (t) => {
  const { directory, dbPath } = place(t);
  makeOlder(dbPath);
  const { NOTIFY_SOCKET, next } = await startListening(t, directory);
  const service = serveWithLog(t, directory, { env: { NOTIFY_SOCKET, NODE_OPTIONS: KNOWS_OLDER_SCHEMAS } });
  await next('EXTEND_TIMEOUT_USEC=86400000000');
  await next('READY=1');
  t.equal(await (await service).stop(), 0);
});

t.test('if systemd-notify cannot be started or fails, serve warns and goes on', async (t) => {
  const { directory } = place(t);
  const [none, failing, killed, file] = ['none', 'failing', 'killed', 'file'].map((name) =>
    join(directory, name),
  ) as [string, string, string, string];
  for (const [path, script] of [
    [failing, 'exit 3'],
    [killed, 'kill -KILL $$'],
  ] as const) {
    mkdirSync(path);
    writeFileSync(join(path, 'systemd-notify'), `#!/bin/sh\n${script}\n`, { mode: 0o755 });
  }
  writeFileSync(file, '');
  const cases = [
    [none, 'spawn systemd-notify ENOENT'],
    [`${none}:${file}`, 'spawn ENOTDIR'],
    [failing, 'systemd-notify exited with 3'],
    [killed, 'systemd-notify was ended by SIGKILL'],
  ] as const;
  for (const [PATH, problem] of cases) {
    const service = spawn(
      process.execPath,
      [MAIN, 'serve', '--listen', '127.0.0.1:0', '--log-level', 'error'],
      {
        cwd: directory,
        env: { ...COMPILE_CACHE, PATH, NOTIFY_SOCKET: '/nowhere/notify' },
        stdio: ['ignore', 'ignore', 'pipe'],
      },
    );
    t.teardown(() => service.kill('SIGKILL'));
    const [line] = await once(createInterface({ input: service.stderr }), 'line');
    t.equal(line, `warning: systemd was not told READY=1: ${problem}`);
    service.kill('SIGTERM');
    t.strictSame(await once(service, 'exit'), [0, null]);
  }
});
