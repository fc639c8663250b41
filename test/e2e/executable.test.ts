import { type ChildProcess, type SpawnSyncReturns, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  chownSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { text } from 'node:stream/consumers';
import t, { type Test } from 'tap';
import { version } from '../../src/assets.ts';
import { executablePath, heedNodeOptions } from '../helpers/executable.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { ifHas } from '../helpers/programs.ts';
import { hangUp, startReceiver, status } from '../helpers/receiver.ts';

/*
 * What a user gets: the one file, on a machine without Node and without anything else of ours, run by a
 * service account that has no home and nothing in its environment.
 */

/** Whether the tests may switch to the user `nobody`. */
const becomesNobody = ifMayBeNobody(`${tmpdir()}/.`).skip === undefined;
const user = becomesNobody ? { uid: 65534, gid: 65534 } : {};
const ifMayMount =
  becomesNobody && spawnSync('unshare', ['--mount', 'mount', '-t', 'tmpfs', 'none', tmpdir()]).status === 0
    ? {}
    : { skip: 'mounting needs root' };

t.test('--version says the version and writes nothing', async (t) => {
  const place = emptyPlace(t);
  t.match(run(place, ['--version']), { status: 0, stdout: `${version}\n`, stderr: '' });
  t.strictSame(filesIn(place), ['davit']);
});

t.test(
  'NODE_OPTIONS, as other programs need it, neither loads anything into davit nor stops it',
  async (t) => {
    const place = emptyPlace(t);
    const preload = join(place, 'preload.cjs');
    writeFileSync(preload, `console.log('loaded');`);
    chmodSync(preload, 0o644); // whatever the umask
    for (const option of [
      `--require=${JSON.stringify(preload)}`,
      '--require=/nowhere/.pnp.cjs',
      '--inspect=127.0.0.1:0',
      '--unknown',
    ]) {
      t.match(run(place, ['--version'], { NODE_OPTIONS: option }), {
        status: 0,
        stdout: `${version}\n`,
        stderr: '',
      });
    }
  },
);

t.test('--help lists the commands and writes nothing', async (t) => {
  const place = emptyPlace(t);
  const { status, stdout, stderr } = run(place, ['--help']);
  t.match({ status, stderr }, { status: 0, stderr: '' });
  for (const command of ['serve', 'deploy', 'verify', 'admin', 'backup', 'restore', 'doctor']) {
    t.match(stdout, new RegExp(`^ +${command}\\b`, 'm'));
  }
  t.strictSame(filesIn(place), ['davit']);
});

t.test('--version takes less than 150 ms', async (t) => {
  const place = emptyPlace(t);
  // Of a processor, and the quickest of several: other tests run at the same time.
  const durationsMs = Array.from({ length: 8 }, () => processorMsOf(place, ['--version']));
  t.ok(Math.min(...durationsMs) < 150, `${Math.round(Math.min(...durationsMs))} ms`);
});

t.test('the executable is smaller than 116 MB', ifHas('strip'), async (t) => {
  t.ok(statSync(executablePath()).size < 116_000_000, `${statSync(executablePath()).size} bytes`);
});

t.test('a served file', async (t) => {
  t.test('answers, and leaves no side files after a clean stop', async (t) => {
    const place = emptyPlace(t);
    const service = await serve(t, place);
    const response = await fetch(`${service.url}/healthz`);
    t.equal(response.status, 200);
    await response.body?.cancel();
    for (const path of ['docs', 'docs/docs.css', 'v2/openapi.json']) {
      const page = await fetch(`${service.url}/${path}`);
      t.equal(page.status, 200, path);
      t.ok((await page.text()).length > 2_000, path);
    }
    t.equal(addonsMapped(service.process), 1, 'two copies of SQLite would break each other’s locks');

    t.strictSame(await stop(service, 'SIGTERM'), [0, null]);
    t.strictSame(
      filesIn(place).filter((name) => name !== 'davit.db-lock'),
      ['davit', 'davit.db'],
    );
    t.strictSame(filesIn(join(place, 'tmp')), []);
  });

  t.test('leaves no lasting temporary files when its service is killed', async (t) => {
    const place = emptyPlace(t);
    const killed = await serve(t, place);
    t.strictSame(await stop(killed, 'SIGKILL'), [null, 'SIGKILL']);
    t.strictSame(filesIn(join(place, 'tmp')), []);
  });

  t.test('has no debugger thread in its service', async (t) => {
    const place = emptyPlace(t);
    const service = await serve(t, place);
    const tasks = `/proc/${service.process.pid}/task`;
    const names = readdirSync(tasks).map((id) => readFileSync(`${tasks}/${id}/comm`, 'utf8').trim());
    t.ok(names.includes('writer-thread'));
    t.notOk(names.some((name) => /inspector/i.test(name)));
    t.strictSame(await stop(service, 'SIGTERM'), [0, null]);
  });
});

t.test('deploy tries again until it is answered', async (t) => {
  const place = emptyPlace(t);
  const error = { code: 'unauthorized', message: 'this API key is wrong', request_id: 'req_1' };
  const refused = status(401, { body: JSON.stringify({ error }) });
  const service = await startReceiver(t, { answers: [hangUp(), refused] });
  const client = spawn(join(place, 'davit'), ['deploy', 'prj_1', 'main'], {
    env: { DAVIT_KEY: 'davit_key', DAVIT_URL: `http://127.0.0.1:${service.port}` },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  t.teardown(() => client.kill('SIGKILL'));
  t.match(
    await text(client.stderr),
    /^[^\n]* closed the connection: trying again in \w+\nerror: [^\n]*\(401 /,
  );
});

t.test('in a directory that was removed', async (t) => {
  t.test('davit serves a file elsewhere', async (t) => {
    const place = emptyPlace(t);
    const service = await serve(t, place, {}, [
      ...IN_REMOVED,
      join(place, 'davit'),
      `--db=${place}/davit.db`,
    ]);
    t.equal((await fetch(`${service.url}/readyz`)).status, 200);
    t.strictSame(await stop(service, 'SIGTERM'), [0, null]);
  });

  t.test('davit says what to do about relative paths', async (t) => {
    const place = emptyPlace(t);
    const message =
      'error: the current directory was removed: change to another one, or give paths that begin with /\n';
    for (const words of [
      ['serve', '--listen', '127.0.0.1:0'],
      ['admin', 'project', 'list', '--db', 'davit.db'],
      ['admin', 'project', 'create', `--db=${place}/davit.db`, '--name', 'site', '--dir', 'sub'],
    ]) {
      const { status, stderr } = run(place, words, {}, [...IN_REMOVED, join(place, 'davit')]);
      t.strictSame({ status, stderr }, { status: 1, stderr: message }, words.join(' '));
    }
  });
});

t.test('every thread starts from its recorded code cache', async (t) => {
  const place = emptyPlace(t);
  const preload = join(place, 'preload.cjs');
  const told = join(place, 'tmp/told');
  heedNodeOptions(join(place, 'davit'));
  writeFileSync(
    preload,
    `const { appendFileSync } = require('node:fs');
    const vm = require('node:vm');
    vm.Script = class extends vm.Script {
      constructor(text, options) {
        super(text, options);
        appendFileSync(${JSON.stringify(told)}, options.filename + ' ' + this.cachedDataRejected + '\\n');
      }
    };`,
  );
  chmodSync(preload, 0o644); // whatever the umask
  const service = await serve(t, place, { NODE_OPTIONS: `--require=${JSON.stringify(preload)}` });
  t.strictSame(await stop(service, 'SIGTERM'), [0, null]);
  // The checkpointer begins half a second later, and so only where others keep the machine busy.
  const begun = readFileSync(told, 'utf8').trim().split('\n');
  t.strictSame(begun.filter((line) => !line.startsWith('checkpoint-thread')).sort(), [
    'dispatcher-thread.cjs false',
    'main.cjs false',
    'writer-thread.cjs false',
  ]);
});

const CREATE_PROJECT = ['admin', 'project', 'create', '--name', 'site'];

t.test('where temporary directories are mounted noexec', ifMayMount, async (t) => {
  t.test('davit takes one that is not', async (t) => {
    const place = emptyPlace(t);
    const { status, stdout } = runWithNoexec(place, ['tmp'], CREATE_PROJECT);
    t.equal(status, 0);
    t.match(stdout, /^prj_\w+\n$/);
    t.strictSame(filesIn(place), ['davit', 'davit.db']);
  });

  t.test('davit says what to do if there is none', async (t) => {
    const place = emptyPlace(t);
    const forbidden = ['tmp', ...['/var/tmp', '/dev/shm'].filter((path) => existsSync(path))];
    const { status, stdout, stderr } = runWithNoexec(place, forbidden, CREATE_PROJECT);
    t.match({ status, stdout }, { status: 1, stdout: '' });
    t.match(stderr, /^[^\n]*no directory to load better_sqlite3 from .* set TMPDIR to one [^\n]*\n$/);
    t.strictSame(filesIn(place), ['davit']);
  });
});

t.test('an unsupported system is named in one line, and no file is created', async (t) => {
  const place = emptyPlace(t);
  heedNodeOptions(join(place, 'davit'));
  const preload = join(place, 'preload.cjs');
  writeFileSync(
    preload,
    `process.dlopen = () => {
      throw Object.assign(new Error("version 'GLIBC_2.33' not found"), { code: 'ERR_DLOPEN_FAILED' });
    };`,
  );
  chmodSync(preload, 0o644); // whatever the umask
  const environment = { NODE_OPTIONS: `--require=${JSON.stringify(preload)}` };
  for (const commandLine of [CREATE_PROJECT, ['serve', '--listen', '127.0.0.1:0']]) {
    const { status, stdout, stderr } = run(place, commandLine, environment);
    t.match({ status, stdout }, { status: 1, stdout: '' });
    t.match(
      stderr,
      /^error: SQLite cannot be loaded \(version 'GLIBC_2\.33' not found\): davit needs glibc 2\.34 [^\n]*\n$/,
    );
  }
  t.strictSame(filesIn(place), ['davit', 'preload.cjs']);
});

t.test('a missing /proc is named as the cause', ifMayMount, async (t) => {
  const place = emptyPlace(t);
  const { status, stdout, stderr } = runAfter(place, ['mount -t tmpfs none /proc'], CREATE_PROJECT);
  t.match({ status, stdout }, { status: 1, stdout: '' });
  t.match(
    stderr,
    /^error: \/proc does not show this process, [^\n]*: mount \/proc in the PID namespace of davit\n$/,
  );
  t.strictSame(filesIn(place), ['davit']);
});

t.test('davit works under umask 177, which denies its owner the execute bit', ifMayMount, async (t) => {
  const place = emptyPlace(t);
  const { status, stdout } = runAfter(place, ['umask 177'], CREATE_PROJECT);
  t.equal(status, 0);
  t.match(stdout, /^prj_\w+\n$/);
  t.strictSame(filesIn(place), ['davit', 'davit.db']);
});

/** A directory of the user's own with nothing in it but the executable and an empty `tmp`. */
function emptyPlace(t: Test): string {
  const place = join(tmpdir(), `davit-executable-test-${process.pid}-${t.name.replaceAll(/\W/g, '-')}`);
  mkdirSync(place);
  t.teardown(() => rmSync(place, { recursive: true }));
  copyFileSync(executablePath(), join(place, 'davit'));
  chmodSync(join(place, 'davit'), 0o755);
  mkdirSync(join(place, 'tmp'));
  if (becomesNobody) for (const path of [place, join(place, 'tmp')]) chownSync(path, 65534, 65534);
  return place;
}

function filesIn(directory: string): string[] {
  return readdirSync(directory).filter((name) => name !== 'tmp');
}

/** What runs the rest of the command line in a directory that is removed already. */
const IN_REMOVED: [string, ...string[]] = [
  'sh',
  '-c',
  'mkdir gone && cd gone && rmdir "$PWD" && exec "$@"',
  'sh',
];

function run(
  place: string,
  words: string[],
  environment: Record<string, string> = {},
  [program, ...before]: [string, ...string[]] = [join(place, 'davit')],
): SpawnSyncReturns<string> {
  return spawnSync(program, [...before, ...words], {
    cwd: place,
    env: { TMPDIR: join(place, 'tmp'), PATH: '/usr/bin:/bin', ...environment },
    encoding: 'utf8',
    ...user,
  });
}

/** What `run` with these words takes of a processor: the second line of times, dash(1), says it of the children. */
function processorMsOf(place: string, commandLine: string[]): number {
  const { stdout } = spawnSync('sh', ['-c', './davit "$@" >/dev/null; times', 'sh', ...commandLine], {
    cwd: place,
    env: { TMPDIR: join(place, 'tmp') },
    encoding: 'utf8',
    ...user,
  });
  const [, inUser, inKernel] = /\n0m([\d.]+)s 0m([\d.]+)s\n$/.exec(stdout) ?? [];
  return (Number(inUser) + Number(inKernel)) * 1_000;
}

/** `run` with TMPDIR=`<place>/tmp` on a machine where nothing in `directories` may be executed. */
function runWithNoexec(
  place: string,
  directories: string[],
  commandLine: string[],
): SpawnSyncReturns<string> {
  const mounts = directories.map((directory) => `mount -t tmpfs -o noexec,mode=1777 none '${directory}'`);
  return runAfter(place, mounts, commandLine);
}

/** `run` where a shell ran these commands before, on mounts of its own. */
function runAfter(place: string, commands: string[], commandLine: string[]): SpawnSyncReturns<string> {
  const become =
    'exec setpriv --reuid=65534 --regid=65534 --clear-groups env -i TMPDIR="$PWD/tmp" ./davit "$@"';
  return spawnSync(
    'unshare',
    ['--mount', 'sh', '-c', [...commands, become].join(' && '), 'sh', ...commandLine],
    { cwd: place, encoding: 'utf8' },
  );
}

interface RunningService {
  process: ChildProcess;
  url: string;
}

async function serve(
  t: Test,
  place: string,
  environment: Record<string, string> = {},
  [program, ...before]: [string, ...string[]] = [join(place, 'davit')],
): Promise<RunningService> {
  const service = spawn(program, [...before, 'serve', '--listen', '127.0.0.1:0'], {
    cwd: place,
    env: { TMPDIR: join(place, 'tmp'), PATH: '/usr/bin:/bin', ...environment },
    stdio: ['ignore', 'pipe', 'inherit'],
    ...user,
  });
  t.teardown(() => service.kill('SIGKILL'));
  for await (const line of createInterface(service.stdout)) {
    const url = /^davit listening on (http:\/\/\S+)$/.exec(line)?.[1];
    if (url !== undefined) return { process: service, url };
  }
  throw new Error('davit serve ended before it listened');
}

/** The exit code and the signal that ended it. */
async function stop(service: RunningService, signal: NodeJS.Signals): Promise<unknown[]> {
  const ended = once(service.process, 'exit');
  service.process.kill(signal);
  return ended;
}

/** How many copies of better-sqlite3 the process has mapped as code. */
function addonsMapped(process: ChildProcess): number {
  const maps = readFileSync(`/proc/${process.pid}/maps`, 'utf8').split('\n');
  return maps.filter((line) => line.includes('better_sqlite3') && line.includes('r-xp')).length;
}
