import { closeSync, constants, openSync, writeSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import { createPipeReader, type PipeReader } from '../../src/deploy/pipes.ts';
import { codeOf } from '../../src/errors.ts';
import { createTurns, TURN_MAX_MS } from '../../src/turns.ts';
import { openPipes, posix, until } from '../helpers/commands.ts';
import { type FakeEffects, fakeEffects, stayAlive } from '../helpers/effects.ts';

t.test('output of a command that has ended is handed on at once', async (t) => {
  const { reader } = setUp(t);
  const pipe = testPipe(t);
  const { pieces, onBytes } = collecting();
  pipe.write('all of it');
  pipe.end();
  const reading = reader.read(pipe.descriptor, onBytes);
  reading.handOnNow();
  await reading.ended;
  t.equal(textOf(pieces), 'all of it');
  t.throws(() => closeSync(pipe.descriptor), { code: 'EBADF' });
});

t.test('a pipe that is held open after the end is watched, and what comes is handed on', async (t) => {
  const { reader } = setUp(t);
  const pipe = testPipe(t);
  const { pieces, onBytes } = collecting();
  const before = watchedPipes();
  const reading = reader.read(pipe.descriptor, onBytes);
  reading.handOnNow();
  await until(() => watchedPipes() === before + 1);
  pipe.write('later');
  pipe.end();
  await reading.ended;
  t.equal(textOf(pieces), 'later');
});

t.test('what is in a pipe is handed on, whoever still holds it open', async (t) => {
  const { reader, effects } = setUp(t);
  for (const isWatched of [false, true]) {
    const pipe = testPipe(t);
    const { pieces, onBytes } = collecting();
    const reading = reader.read(pipe.descriptor, onBytes);
    pipe.write('first, ');
    if (isWatched) {
      effects.advance(10);
      await until(() => pieces.length === 1);
    }
    pipe.write('second');
    reading.finish();
    await reading.ended;
    t.equal(textOf(pieces), 'first, second', isWatched ? 'watched' : 'at once');
  }
});

t.test('endless output does not keep a reading from its end, and does not break the pipe', async (t) => {
  const { reader, effects } = setUp(t);
  for (const isWatched of [false, true]) {
    let [size, sizeBefore] = [0, 0];
    const pipes = [testPipe(t), testPipe(t)] as const;
    const [reading, other] = pipes.map((pipe) => {
      pipe.fill();
      return reader.read(pipe.descriptor, async (bytes) => {
        if (pipe === pipes[0]) size += bytes.length;
        effects.advance(TURN_MAX_MS); // what a look through it takes
        if (size < sizeBefore + 8 * 1024 * 1024) for (const each of pipes) each.fill();
      });
    });
    if (isWatched) effects.advance(10);
    for (let turn = 0; turn < 3; turn++) await nextTurn();
    sizeBefore = size;
    reading?.finish();
    await reading?.ended;
    t.ok(size >= sizeBefore + 1024 * 1024, 'what a pipe can hold is read');
    t.ok(size < sizeBefore + 4 * 1024 * 1024, 'and not for ever');
    t.notOk(pipes[0].isBroken());
    other?.finish();
    await other?.ended;
  }
});

t.test('a fast writer gets its share of a turn of the event loop and no more', async (t) => {
  const { reader, effects } = setUp(t);
  const flooding = [testPipe(t), testPipe(t)];
  let turn = 0;
  const turns: number[] = [];
  const readings = flooding.map((pipe) =>
    reader.read(pipe.descriptor, async () => {
      turns.push(turn);
      effects.advance(TURN_MAX_MS); // what a look through it takes
      pipe.fill();
    }),
  );
  for (const pipe of flooding) pipe.fill();
  effects.advance(10);
  for (; turns.length < 10; turn++) await nextTurn();
  t.equal(new Set(turns).size, turns.length, 'one piece in each');
  for (const reading of readings) reading.finish();
  await Promise.all(readings.map(({ ended }) => ended));
});

t.test('pipes that are read at the same time do not mix', async (t) => {
  const { reader } = setUp(t);
  const texts = ['one '.repeat(1000), 'two '.repeat(1000), 'three '.repeat(1000)];
  const read = texts.map(async (text) => {
    const pipe = testPipe(t);
    pipe.write(text);
    pipe.end();
    const pieces: string[] = [];
    const reading = reader.read(pipe.descriptor, async (bytes) => {
      await nextTurn();
      pieces.push(Buffer.from(bytes).toString());
    });
    reading.handOnNow();
    await reading.ended;
    return pieces.join('');
  });
  t.strictSame(await Promise.all(read), texts);
});

t.test('a pipe that stays open is read on slowly, and its writer is not blocked', async (t) => {
  const { reader, effects } = setUp(t);
  for (const isWatched of [false, true]) {
    const pipe = testPipe(t);
    await leftOpen(reader, pipe, isWatched ? effects : undefined);
    let written = 0;
    // A pipe holds 64 KiB, and as much is read at a time.
    for (let turn = 0; turn < 50; turn++) {
      written += pipe.fill();
      await nextTurn();
    }
    t.ok(written <= 256 * 1024, `${written} bytes were taken while the clock stood still`);
    for (const goalBytes = written + 1024 * 1024; written < goalBytes; written += pipe.fill()) {
      effects.advance(50);
      await nextTurn();
    }
  }
});

t.test('up to a hundred pipes that stay open are read on, and the oldest of more is closed', async (t) => {
  const { reader } = setUp(t);
  const before = openPipes();
  const pipes: TestPipe[] = [];
  const leaveOneOpen = async () => {
    const pipe = testPipe(t);
    await leftOpen(reader, pipe);
    pipes.push(pipe);
  };
  for (let count = 0; count < 100; count++) await leaveOneOpen();
  for (const pipe of pipes.slice(50)) pipe.end();
  await until(() => openPipes() === before + 100);
  for (let count = 0; count < 50; count++) await leaveOneOpen();
  const living = [...pipes.slice(0, 50), ...pipes.slice(100)];
  t.notOk(living.some(({ isBroken }) => isBroken()));
  await leaveOneOpen();
  await until(() => living[0]?.isBroken() === true);
  t.notOk(living.slice(1).some(({ isBroken }) => isBroken()));
});

t.test('a hundred stay open also when several are left in one turn of the event loop', async (t) => {
  const { reader } = setUp(t);
  const before = openPipes();
  for (let count = 0; count < 100; count++) await leftOpen(reader, testPipe(t));
  for (let round = 0; round < 5; round++) {
    const readings = [testPipe(t), testPipe(t)].map(({ descriptor }) =>
      reader.read(descriptor, async () => undefined),
    );
    for (const reading of readings) reading.finish();
    await Promise.all(readings.map(({ ended }) => ended));
    await nextTurn();
  }
  // 110 writers, and of the readers a hundred
  await until(() => openPipes() <= before + 210);
  t.equal(openPipes(), before + 210);
});

t.test('an error of the consumer rejects the reading, and the writer is not blocked', async (t) => {
  const { reader, effects } = setUp(t);
  for (const isWatched of [false, true]) {
    const pipe = testPipe(t);
    pipe.write('x');
    const reading = reader.read(pipe.descriptor, () => Promise.reject(new Error('no')));
    if (isWatched) effects.advance(10);
    else reading.handOnNow();
    await t.rejects(reading.ended, { message: 'no' });
    for (let written = 0; written < 1024 * 1024; written += pipe.fill()) {
      effects.advance(50);
      await nextTurn();
    }
  }
});

t.test('closing the reader closes every pipe and ends the readings', async (t) => {
  const { reader, effects } = setUp(t);
  const [watched, left] = [testPipe(t), testPipe(t)];
  await leftOpen(reader, left);
  const reading = reader.read(watched.descriptor, async () => undefined);
  effects.advance(10);
  await nextTurn();
  reader.close();
  await reading.ended;
  await until(() => watched.isBroken() && left.isBroken());
});

t.test('commands take turns: each pipe is a party of its own', async (t) => {
  stayAlive(t);
  const effects = fakeEffects();
  const parties = new Set<unknown>();
  const inTurn = createTurns(effects);
  const reader = createPipeReader(effects, {
    inTurn: (task, party) => {
      parties.add(party);
      return inTurn(task, party);
    },
  });
  t.teardown(() => reader.close());
  const pipes = [testPipe(t), testPipe(t)];
  const readings = pipes.map(({ descriptor }) => reader.read(descriptor, async () => undefined));
  effects.advance(10);
  for (const pipe of pipes) {
    pipe.write('text');
    pipe.end();
  }
  await Promise.all(readings.map(({ ended }) => ended));
  t.equal(parties.size, 2);
});

function setUp(t: Test): { reader: PipeReader; effects: FakeEffects } {
  stayAlive(t);
  const effects = fakeEffects();
  const reader = createPipeReader(effects, { inTurn: createTurns(effects) });
  t.teardown(() => reader.close());
  return { reader, effects };
}

interface TestPipe {
  /** What is read. */
  descriptor: number;
  write(text: string): void;
  /** Writes until the pipe is full; how many bytes that took. */
  fill(): number;
  /** Whether nobody reads it any more. */
  isBroken(): boolean;
  /** The last writer closes it. */
  end(): void;
}

function testPipe(t: Test): TestPipe {
  const descriptor = posix.pipe();
  const writer = openSync(`/proc/self/fd/${descriptor}`, constants.O_WRONLY | constants.O_NONBLOCK);
  let isOpen = true;
  t.teardown(end);
  return { descriptor, write, fill, isBroken, end };

  function write(text: string): void {
    writeSync(writer, text);
  }
  function fill(): number {
    for (let written = 0; ; ) {
      try {
        written += writeSync(writer, BYTES);
      } catch (error) {
        if (codeOf(error) === 'EAGAIN') return written;
        throw error;
      }
    }
  }
  function isBroken(): boolean {
    try {
      writeSync(writer, 'x');
      return false;
    } catch (error) {
      return codeOf(error) === 'EPIPE';
    }
  }
  function end(): void {
    if (isOpen) closeSync(writer);
    isOpen = false;
  }
}

const BYTES = Buffer.alloc(4096, 'x');

/** Has the pipe read to its end, while its writer holds it open; watched before that, if there is a clock to move. */
async function leftOpen(reader: PipeReader, { descriptor }: TestPipe, effects?: FakeEffects): Promise<void> {
  const reading = reader.read(descriptor, async () => undefined);
  effects?.advance(10);
  await nextTurn();
  reading.finish();
  await reading.ended;
}

/** How many the event loop looks at. */
function watchedPipes(): number {
  return process.getActiveResourcesInfo().filter((name) => name === 'PipeWrap').length;
}

function collecting() {
  const pieces: Uint8Array[] = [];
  return {
    pieces,
    async onBytes(bytes: Uint8Array) {
      pieces.push(bytes);
    },
  };
}

function textOf(pieces: Uint8Array[]): string {
  return Buffer.concat(pieces).toString();
}
