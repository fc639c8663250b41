import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, openSync } from 'node:fs';
import { join } from 'node:path';
import type { Duplex, Readable } from 'node:stream';
import t from 'tap';
import { logFormOf } from '../src/logger.ts';
import { COMPILE_CACHE } from './helpers/cli.ts';
import { ifMayMount, onSmallDisk } from './helpers/small-disk.ts';
import { temporaryDirectory } from './helpers/store.ts';
import { needsTerminal } from './helpers/terminal.ts';

const ESCAPE = '\u001b';
const PROGRAM = join(import.meta.dirname, 'fixtures/logs.ts');

t.test('the log is JSON, but text on a terminal, with colours if it has them', async (t) => {
  t.equal(logFormOf({}), 'json');
  t.equal(logFormOf({ isTTY: true }), 'text');
  t.equal(logFormOf({ isTTY: true, hasColors: () => false }), 'text');
  t.equal(logFormOf({ isTTY: true, hasColors: () => true }), 'colours');
});

t.test('a pipe gets one line of JSON per entry, without further properties of errors', async (t) => {
  const { stderr } = spawnSync(process.execPath, [PROGRAM], { env: COMPILE_CACHE, encoding: 'utf8' });
  const [request, bug, thrown, circle, quota, ...more] = stderr
    .trimEnd()
    .split('\n')
    .map((line) => JSON.parse(line));
  t.strictSame(more, []);
  t.match(request, {
    level: 'info',
    time: /^20.*Z$/,
    request_id: 'req_1',
    note: 'a\u001b[2Jb',
    msg: 'request',
  });
  t.strictSame(Object.keys(bug.err), ['type', 'message', 'stack', 'cause']);
  t.match(bug, {
    level: 'error',
    err: {
      type: 'TypeError',
      message: 'outer',
      stack: /^TypeError: outer\n {4}at .*logs\.ts/,
      cause: { type: 'Error', code: 'EINNER', message: 'inner' },
    },
  });
  t.match(thrown, { err: { message: 'the text \u001b[2J' } });
  t.strictSame(Object.keys(circle.err), ['type', 'message', 'stack', 'cause']);
  t.equal(JSON.stringify(circle.err).split('"message":"round"').length - 1, 6, 'it and five causes');
  const message = "EDQUOT: disk quota exceeded, mkdtemp '/tmp/x'";
  t.match(quota.err, { type: 'Error', code: 'EDQUOT', message, stack: `Error: ${message}\n    at ` });
  t.notMatch(stderr, /secret/);
});

t.test('a line is written soon, not only when the next comes or the process ends', async (t) => {
  const child = spawn(process.execPath, [PROGRAM], {
    env: { ...COMPILE_CACHE, LINGER: '1' },
    stdio: ['pipe', 'ignore', 'pipe'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  let stderr = '';
  for await (const piece of child.stderr.setEncoding('utf8')) {
    stderr += piece;
    if (stderr.includes('"msg":"quota"}\n')) child.stdin.end();
  }
  t.equal(stderr.split('\n').length, 6);
});

t.test('on a terminal the log is text, with colours unless NO_COLOR is set', needsTerminal, async (t) => {
  const shownWith = (env: Record<string, string>) =>
    spawnSync('script', ['-qec', `'${process.execPath}' '${PROGRAM}'`, '/dev/null'], {
      env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', TERM: 'xterm-256color', ...env },
      input: '',
      encoding: 'utf8',
    }).stdout.replaceAll('\r\n', '\n');
  const plain = shownWith({ NO_COLOR: '1' });
  t.match(plain, /^20\S+Z INFO {2}request request_id=req_1 note=a\\x1b\[2Jb\n/m);
  t.match(
    plain,
    /\n20\S+Z ERROR bug\n {4}TypeError: outer\n {8}at .*\n[\s\S]* {4}caused by\n {4}Error: inner\n/,
  );
  t.match(plain, /\n20\S+Z ERROR thrown\n {4}the text \\x1b\[2J\n/);
  t.notOk(plain.includes(ESCAPE));
  const coloured = shownWith({});
  t.ok(coloured.includes(`${ESCAPE}[32mINFO`));
  t.ok(coloured.includes(`note=${ESCAPE}[39ma\\x1b[2Jb\n`));
  t.match(shownWith({ TERM: 'dumb' }), /^20\S+Z INFO {2}request/m);
});

t.test('a log that cannot be written neither ends the process nor fills memory', async (t) => {
  const { status, stdout } = spawnSync(process.execPath, [PROGRAM], {
    env: { ...COMPILE_CACHE, COUNT: '200000' },
    stdio: ['ignore', 'pipe', openSync('/dev/full', 'w')],
    encoding: 'utf8',
  });
  t.equal(status, 0);
  t.ok(Number(stdout) < 300_000_000, `${stdout.trim()} bytes resident after 200 MB of log`);
});

t.test('a reader that stalls holds nothing up, and gets the lines kept for it when it goes on', async (t) => {
  const child = spawn(process.execPath, [PROGRAM], { env: { ...COMPILE_CACHE, COUNT: '5000', LINGER: '1' } });
  t.teardown(() => child.kill('SIGKILL'));
  await once(child.stdout, 'data'); // said after all that was logged
  let stderr = '';
  for await (const piece of child.stderr.setEncoding('utf8')) {
    stderr += piece;
    if (stderr.length > 1_000_000) child.stdin.end();
  }
  const lines = stderr.trimEnd().split('\n');
  t.doesNotThrow(() => lines.map((line) => JSON.parse(line)));
  t.ok(lines.length > 900 && lines.length < 5_000, `${lines.length} lines of 5,000`);
});

t.test('a terminal that stalls, as at ^S, holds nothing up either', needsTerminal, async (t) => {
  const child = spawn('script', ['-qec', `'${process.execPath}' '${PROGRAM}' <&3 >&4`, '/dev/null'], {
    env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin', NO_COLOR: '1', COUNT: '5000', LINGER: '1' },
    stdio: ['ignore', 'pipe', 'inherit', 'pipe', 'pipe'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  const [input, said] = child.stdio.slice(3) as [Duplex, Duplex];
  await once(said, 'data'); // after all that was logged
  let shown = '';
  for await (const piece of (child.stdout as Readable).setEncoding('utf8')) {
    shown += piece;
    if (shown.length > 100_000) input.end();
  }
  t.match(shown, /INFO {2}x{1000}\r\n/);
});

t.test("threads do not write into each other's lines, however slow the reader is", async (t) => {
  const env = { ...COMPILE_CACHE, COUNT: '700', THREADS: '1', LINGER: '1' };
  const child = spawn(process.execPath, [PROGRAM], { env });
  t.teardown(() => child.kill('SIGKILL'));
  let written = '';
  // Both threads have filled the pipe by then, and keep the rest.
  for await (const piece of child.stdout.setEncoding('utf8')) {
    written += piece;
    if (written.split('\n').length === 3) break;
  }
  let stderr = '';
  for await (const piece of child.stderr.setEncoding('utf8')) {
    stderr += piece;
    if (stderr.split('\n').length === 2 * 705 + 1) child.stdin.end();
  }
  const lines = stderr.trimEnd().split('\n');
  t.doesNotThrow(() => lines.map((line) => JSON.parse(line)));
  t.equal(lines.length, 2 * 705);
});

t.test('the log goes on once the disk has room again', ifMayMount, async (t) => {
  const directory = temporaryDirectory(t);
  mkdirSync(join(directory, 'small'));
  const { stdout } = await onSmallDisk(directory, 'small', '4m', [
    'head -c 4000000 /dev/zero >small/filler 2>/dev/null',
    `COUNT=5000 FILLER=small/filler "$0" '${PROGRAM}' 2>small/log >/dev/null; echo "exit $?"; tail -n 1 small/log`,
  ]);
  const [ended, last = ''] = stdout.split('\n');
  t.equal(ended, 'exit 0');
  t.match(JSON.parse(last), { msg: 'written' });
});
