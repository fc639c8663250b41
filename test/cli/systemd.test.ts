import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import koffi from 'koffi';
import t, { type Test } from 'tap';
import { createNotifier } from '../../src/cli/notify.ts';
import { realEffects } from '../../src/effects.ts';
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
  t.notMatch(stdout, /NotifyAccess/, 'davit tells systemd itself');
  t.match(stdout, /\/etc\/davit\.env .*but not DAVIT_DB: /);
  t.notMatch(stdout, /install -d|^ReadWritePaths|^RequiresMountsFor/m, 'systemd makes its directory');
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
  t.match(stdout, /^# {3}useradd --system --home-dir \/srv\/my\\ files .* www-data$/m);
  t.match(stdout, /^# {3}install -d -o www-data -m 700 \/srv\/my\\ files {3}#/m);
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

t.test('a unit for a database elsewhere takes no directory from another service', async (t) => {
  const unit = async (...options: string[]) => (await run(['admin', 'systemd-unit', ...options])).stdout;
  const staging = await unit('--user', 'staging', '--db', '/srv/staging/davit.db');
  t.notMatch(staging, /^StateDirectory|\/var\/lib\/davit/m);
  const usual = await unit('--db', '/srv/davit/davit.db');
  t.notMatch(usual, /^StateDirectory/m);
  t.match(
    usual,
    /^ReadWritePaths=\/srv\/davit\n.*\nReadWritePaths=-\/var\/lib\/davit$/m,
    'it may have that home',
  );

  const ofRoot = await unit('--db', '/usr/davit.db');
  t.match(ofRoot, /^# {3}# \/usr belongs to root: with --db, give davit a directory of its own$/m);
  t.notMatch(ofRoot, /install -d/, 'that would take it from root');
  t.notMatch(await unit('--user', 'root', '--db', '/usr/davit.db'), /belongs to|install -d/);
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

t.test('the unit runs davit by the link that it was called by, which an upgrade may change', (t) => {
  const directory = mkdtempSync('/tmp/davit-test-');
  t.teardown(() => rmSync(directory, { recursive: true }));
  mkdirSync(join(directory, 'bin'));
  symlinkSync(process.execPath, join(directory, 'bin/davit'));
  mkdirSync(join(directory, 'other/one'), { recursive: true });
  symlinkSync('other/one', join(directory, 'elsewhere'));
  // The same directory by a name that the sandbox does not hide.
  const seen = `/proc/self/root${directory}`;
  const link = `${seen}/bin/davit`;
  const calls: [argv0: string, path: string, runs: string][] = [
    [link, '', link],
    [link.slice(1), '', link],
    ['davit', `/nowhere:${seen}/bin`, link],
    ['davit', `/nowhere:${seen.slice(1)}/bin`, link],
    // Not by what is another program, is not there, is hidden from the unit, or needs `..`, which systemd refuses.
    ['sh', '/bin', process.execPath],
    ['davit', '/nowhere', process.execPath],
    [`${directory}/bin/davit`, '', process.execPath],
    [`${seen}/elsewhere/../../bin/davit`, '', process.execPath],
  ];
  for (const [argv0, path, runs] of calls) {
    const { stdout } = spawnSync(process.execPath, [MAIN, 'admin', 'systemd-unit'], {
      argv0,
      cwd: '/',
      env: { ...COMPILE_CACHE, PATH: path },
      encoding: 'utf8',
    });
    t.match(unquoted(stdout), `\nExecStart=${runs} ${MAIN} serve `, argv0);
  }
  t.end();
});

t.test('a unit is printed from a directory that was removed, too', (t) => {
  const { directory } = place(t);
  const removed = join(directory, 'removed');
  mkdirSync(removed);
  const words = ['-c', 'rmdir "$PWD"; exec "$@"', 'sh', process.execPath, MAIN, 'admin', 'systemd-unit'];
  const env = { ...COMPILE_CACHE, PATH: '/usr/bin:/bin' };
  const { stdout } = spawnSync('/bin/sh', words, { cwd: removed, env, encoding: 'utf8' });
  t.match(unquoted(stdout), `\nExecStart=${process.execPath} ${MAIN} serve `);
  t.end();
});

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

const libc = koffi.load('libc.so.6');
const socket = libc.func('int socket(int domain, int type, int protocol)');
const bind = libc.func('int bind(int socket, void *address, uint32_t addressLength)');
const recv = libc.func('long recv(int socket, void *message, size_t length, int flags)');
const sendto = libc.func(
  'long sendto(int socket, void *message, size_t length, int flags, void *address, uint32_t addressLength)',
);
const close = libc.func('int close(int descriptor)');
const shutdown = libc.func('int shutdown(int socket, int how)');
const [AF_UNIX, SOCK_DGRAM, MSG_DONTWAIT, SHUT_RDWR] = [1, 2, 0x40, 2];

/** What fills the queue. */
const FILLING = '\0';

/** Systemd's end of the notify socket, of this path or with @ of this abstract name. `next` gives the next message. */
function startListening(t: Test, NOTIFY_SOCKET: string) {
  const descriptor = socket(AF_UNIX, SOCK_DGRAM, 0);
  const address = Buffer.from(`\u0001\0${NOTIFY_SOCKET.replace('@', '\0')}`);
  if (bind(descriptor, address, address.length) < 0) throw new Error(`cannot bind ${NOTIFY_SOCKET}`);
  t.teardown(() => shutdown(descriptor, SHUT_RDWR)); // ends a read that still waits
  const next = async () => {
    const message = Buffer.alloc(4096);
    const length = await promisify<number>((done) =>
      recv.async(descriptor, message, message.length, 0, done),
    )();
    return message.subarray(0, length).toString();
  };
  const fill = () => {
    let sent = 1;
    while (sent > 0) {
      // Each by another socket, as what one may have sent is limited, too.
      const sender = socket(AF_UNIX, SOCK_DGRAM, 0);
      sent = sendto(sender, Buffer.from(FILLING), 1, MSG_DONTWAIT, address, address.length);
      close(sender);
    }
  };
  return { NOTIFY_SOCKET, next, fill };
}

t.test('systemd is told when serve is ready and when it stops', async (t) => {
  const { directory } = place(t);
  const { NOTIFY_SOCKET, next } = startListening(t, join(directory, 'notify'));
  const service = await serveWithLog(t, directory, { env: { NOTIFY_SOCKET, PATH: '/nowhere' } });
  t.equal(await next(), 'READY=1');
  t.equal(await service.stop(), 0);
  t.equal(await next(), 'STOPPING=1');
});

t.test('systemd is told also if its socket has an abstract name', async (t) => {
  const { NOTIFY_SOCKET, next } = startListening(t, `@davit-test-${process.pid}`);
  await createNotifier({ environment: { NOTIFY_SOCKET }, effects: realEffects }, t.fail)('READY=1');
  t.equal(await next(), 'READY=1');
});

t.test('an empty NOTIFY_SOCKET is none: nobody is told, and nothing is logged', async (t) => {
  for (const environment of [{}, { NOTIFY_SOCKET: '' }]) {
    await t.resolves(createNotifier({ environment, effects: realEffects }, t.fail)('READY=1'));
  }
});

t.test('systemd is told once there is room in the queue of its socket', async (t) => {
  const { NOTIFY_SOCKET, next, fill } = startListening(t, join(place(t).directory, 'notify'));
  let tries = 0;
  const after = (_delayMs: number, tryAgain: () => void) => {
    tries += 1;
    if (tries < 3) setImmediate(tryAgain);
    else void next().then(tryAgain);
    return () => undefined;
  };
  const effects = { ...realEffects, after };
  fill();
  const openBefore = readdirSync('/proc/self/fd').length;
  await createNotifier({ environment: { NOTIFY_SOCKET }, effects }, t.fail)('READY=1');
  t.equal(readdirSync('/proc/self/fd').length, openBefore, 'each try has closed its socket');
  while ((await next()) !== 'READY=1');
});

t.test('of the states that wait for room, systemd is told the newest', async (t) => {
  const { NOTIFY_SOCKET, next, fill } = startListening(t, join(place(t).directory, 'notify'));
  const { promise: bothWait, resolve } = Promise.withResolvers<void>();
  const waiting: (() => void)[] = [];
  const after = (_delayMs: number, tryAgain: () => void) => {
    if (waiting.push(tryAgain) === 2) resolve();
    return () => undefined;
  };
  const tell = createNotifier({ environment: { NOTIFY_SOCKET }, effects: { ...realEffects, after } }, t.fail);
  fill();
  const told = Promise.all([tell('READY=1'), tell('STOPPING=1')]);
  await bothWait;
  await next();
  for (const tryAgain of waiting) tryAgain();
  await told;
  let message = FILLING;
  while (message === FILLING) message = await next();
  t.equal(message, 'STOPPING=1');
});

t.test('systemd is asked for more time during a migration', async (t) => {
  const { directory, dbPath } = place(t);
  makeOlder(dbPath);
  const { NOTIFY_SOCKET, next } = startListening(t, join(directory, 'notify'));
  const service = serveWithLog(t, directory, { env: { NOTIFY_SOCKET, NODE_OPTIONS: KNOWS_OLDER_SCHEMAS } });
  t.equal(await next(), 'EXTEND_TIMEOUT_USEC=86400000000');
  t.equal(await next(), 'READY=1');
  t.equal(await (await service).stop(), 0);
});

t.test('if systemd cannot be told, serve logs why and goes on', async (t) => {
  const { directory } = place(t);
  const missing = join(directory, 'missing');
  const service = await serveWithLog(t, directory, { env: { NOTIFY_SOCKET: missing } });
  const { level, msg } = await service.logged(/READY/);
  t.strictSame([level, msg], ['warn', 'systemd was not told READY=1: ENOENT']);
  t.equal(await service.stop(), 0);
  for (const [NOTIFY_SOCKET, problem] of [
    [`@davit-test-${process.pid}-missing`, 'ECONNREFUSED'],
    [`/${'x'.repeat(200)}`, 'NOTIFY_SOCKET is not the address of a Unix socket'],
    ['vsock:2:1', 'NOTIFY_SOCKET is not the address of a Unix socket'],
  ] as const) {
    const problems: string[] = [];
    const warn = (text: string) => void problems.push(text);
    await createNotifier({ environment: { NOTIFY_SOCKET }, effects: realEffects }, warn)('READY=1');
    t.strictSame(problems, [`systemd was not told READY=1: ${problem}`]);
  }
});
