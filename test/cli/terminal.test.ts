import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, closeSync, constants, openSync, writeFileSync } from 'node:fs';
import { Socket } from 'node:net';
import { join } from 'node:path';
import { PassThrough, Readable } from 'node:stream';
import { text } from 'node:stream/consumers';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import { createTerminal } from '../../src/cli/terminal.ts';
import { COMPILE_CACHE, MAIN, place } from '../helpers/cli.ts';
import { namedPipe } from '../helpers/commands.ts';

t.test('results go to stdout and notes to stderr, each with one line end', async (t) => {
  const { terminal, written } = streams({});
  terminal.print('result');
  terminal.print('lines\n');
  terminal.note('note');
  t.equal(written.stdout(), 'result\nlines\n');
  t.equal(written.stderr(), 'note\n');
});

t.test('a pipe has no columns, and a terminal has at least a default', async (t) => {
  t.equal(streams({}).terminal.columns, null);
  t.equal(streams({ isTTY: true, columns: 132 }).terminal.columns, 132);
  t.equal(streams({ isTTY: true, columns: 0 }).terminal.columns, 80);
});

t.test('colours are used only on a terminal that supports them', async (t) => {
  t.equal(streams({ isTTY: true, hasColors: () => true }).terminal.colours, true);
  t.equal(streams({ isTTY: true, hasColors: () => false }).terminal.colours, false, 'NO_COLOR');
  t.equal(streams({ isTTY: true }).terminal.colours, false);
  t.equal(streams({}).terminal.colours, false);
});

t.test('bytes are written unchanged, and write gives false once the reader is gone', async (t) => {
  const { terminal, stdout } = streams({});
  const bytes = Buffer.from([0xff, 0x00, 0x1b]);
  t.equal(await terminal.write(bytes), true);
  t.strictSame(stdout.read(), bytes);
  stdout.destroy();
  t.equal(await terminal.write(bytes), false);
});

t.test('output longer than a pipe buffer is complete when the command fails', async (t) => {
  const { directory, dbPath } = await withFile(t);
  chmodSync(dbPath, 0o644);
  // Each is named in the report.
  const names = Array.from({ length: 500 }, (_, number) => `davit.db.before-${number}-${'x'.repeat(200)}`);
  for (const name of names) writeFileSync(join(directory, name), '');
  // A pipe: between processes of Node there are sockets, which hold more.
  const pipe = namedPipe(t);
  const reading = openSync(pipe, constants.O_RDONLY | constants.O_NONBLOCK);
  const writing = openSync(pipe, 'w');
  const child = spawn(process.execPath, [MAIN, 'doctor', '--json'], {
    cwd: directory,
    env: COMPILE_CACHE,
    stdio: ['ignore', writing, 'pipe'],
  });
  closeSync(writing);
  const ended = once(child, 'close');
  await once(child.stderr as Readable, 'data'); // that something needs attention: all is said
  const stdout = await text(new Socket({ fd: reading }));
  t.strictSame(await ended, [1, null]);
  t.ok(stdout.length > 65_536);
  t.match(JSON.parse(stdout), { ok: false });
});

t.test('flushed resolves once all output was read or its reader is gone', async (t) => {
  const { terminal, stdout, stderr } = streams({});
  const long = 'x'.repeat(2 * stdout.writableHighWaterMark);
  terminal.print(long);
  let flushed = false;
  const flushing = terminal.flushed().then(() => {
    flushed = true;
  });
  await nextTurn();
  t.equal(flushed, false);
  t.equal(String(stdout.read()), `${long}\n`);
  await flushing;
  stdout.destroy();
  stderr.destroy();
  await terminal.flushed();
});

t.test('a question is answered by one trimmed line', async (t) => {
  const { terminal, stdin, written } = streams({ isTTY: true });
  const answer = terminal.ask('Sure? ');
  stdin.write(' yes \n');
  t.equal(await answer, 'yes');
  t.equal(written.stderr(), 'Sure? ');
  t.equal(written.stdout(), '');
});

t.test('the end of input counts as an empty answer', async (t) => {
  const { terminal, stdin } = streams({ isTTY: true });
  stdin.end();
  t.equal(await terminal.ask('Sure? '), '');
});

t.test('a question ends when its signal aborts, and what follows begins a line', async (t) => {
  const { terminal, written } = streams({ isTTY: true });
  const asking = new AbortController();
  const answer = terminal.ask('Sure? ', asking.signal);
  asking.abort();
  t.equal(await answer, '');
  t.equal(written.stderr(), 'Sure? \n');
});

t.test('without a terminal, no question is asked', async (t) => {
  for (const missing of ['stdin', 'stderr'] as const) {
    const { terminal, stdin, written, ...rest } = streams({ isTTY: true });
    t.equal(terminal.canAsk, true);
    Object.assign(missing === 'stdin' ? stdin : rest.stderr, { isTTY: false });
    t.equal(terminal.canAsk, false);
    stdin.write('yes\n');
    t.equal(await terminal.ask('Sure? '), null);
    t.equal(written.stderr(), '');
  }
});

t.test('input is read byte for byte', async (t) => {
  const { terminal, stdin } = streams({});
  const bytes = Buffer.from([0xff, 0x00, 0x0d, 0x0a, 0xc3]);
  stdin.write(bytes.subarray(0, 2));
  stdin.end(bytes.subarray(2));
  t.strictSame(await terminal.readInput(), bytes);
});

t.test('input of which there is no end is refused, and not read any further', async (t) => {
  const { terminal, stdin } = streams({});
  let given = 0;
  const source = Readable.from(
    (function* () {
      for (; given < 64; given += 1) yield Buffer.alloc(1024 * 1024);
    })(),
  );
  t.teardown(() => source.destroy());
  source.pipe(stdin);
  const message = 'stdin holds more than 16 MiB: check that it is the right file';
  await t.rejects(terminal.readInput(), { code: 'invalid_request', message });
  t.ok(given < 64, 'not all was read');
});

t.test('EPIPE on stdout and errors of stderr are ignored, and a full disk is reported', async (t) => {
  const { stdout, stderr, lost } = streams({});
  stdout.emit('error', Object.assign(new Error('write EPIPE'), { code: 'EPIPE' }));
  stderr.emit('error', new Error('gone'));
  t.strictSame(lost, []);
  stdout.emit('error', Object.assign(new Error('write ENOSPC'), { code: 'ENOSPC' }));
  t.strictSame(lost, ['write ENOSPC']);
});

t.test('progress overwrites its own line, and a note replaces it', async (t) => {
  const { terminal, written } = streams({ isTTY: true, columns: 20 });
  terminal.progress('copying: 1 %');
  terminal.progress('copying: 99 % of very much');
  terminal.note('done');
  terminal.note('really');
  t.equal(
    written.stderr(),
    'copying: 1 %\r\u001b[Kcopying: 99 % of ve\r\u001b[Kdone\nreally\n',
    'no line is wider than the terminal',
  );
});

t.test('without a terminal there is no progress', async (t) => {
  const { terminal, written } = streams({});
  terminal.progress('copying: 1 %');
  terminal.note('done');
  t.equal(written.stderr(), 'done\n');
});

t.test('a terminal that knows no control sequences gets none', async (t) => {
  const { terminal, written } = streams({ isTTY: true }, { TERM: 'dumb' });
  terminal.progress('copying: 1 %');
  terminal.note('done');
  t.equal(written.stderr(), 'done\n');
});

async function withFile(t: Test) {
  const there = place(t);
  await there.davit(['admin', 'project', 'create', '--name', 'site', '--', '/bin/true']);
  return there;
}

/** A terminal on streams in memory; `kind` is what makes a stream one of a terminal. */
function streams(
  kind: { isTTY?: boolean; columns?: number; hasColors?: () => boolean },
  env: { readonly TERM?: string } = {},
) {
  const make = () => Object.assign(new PassThrough(), kind);
  const [stdin, stdout, stderr] = [make(), make(), make()];
  const lost: string[] = [];
  const terminal = createTerminal({ stdin, stdout, stderr, env }, ({ message }) => lost.push(message));
  const textOf = (stream: PassThrough) => () => String(stream.read() ?? '');
  return {
    terminal,
    stdin,
    stdout,
    stderr,
    lost,
    written: { stdout: textOf(stdout), stderr: textOf(stderr) },
  };
}
