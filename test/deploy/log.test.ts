import assert from 'node:assert/strict';
import fc from 'fast-check';
import t from 'tap';
import { createLogKeeper, type LogKeeper } from '../../src/deploy/log.ts';
import { collectGarbage } from '../../src/memory.ts';
import type { LogAppend } from '../../src/store/logs.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, testStore } from '../helpers/store.ts';

const KIB = 1024;

t.test('small writes are batched for 200 ms', async (t) => {
  const { keeper, appends, effects } = keeperFor();
  await keeper.append(Buffer.from('one '));
  effects.advance(150);
  await keeper.append(Buffer.from('two '));
  t.strictSame(appends, []);
  effects.advance(50);
  t.strictSame(texts(appends), [['one two ']]);
  await settled();
  await keeper.append(Buffer.from('three'));
  await keeper.end();
  t.strictSame(texts(appends), [['one two '], ['three']]);
  t.match(appends[1], { logBytes: 13, dropTailBefore: null });
  effects.advance(10_000);
  t.equal(appends.length, 2);
});

t.test('a command that prints in small pieces costs five writes a second', async (t) => {
  const { keeper, appends, effects } = keeperFor();
  await keeper.append(Buffer.from('. '));
  effects.advance(150);
  await keeper.append(Buffer.alloc(64 * KIB, 'x'));
  await settled();
  t.equal(appends.length, 1, 'a full chunk, which did not wait');
  for (let number = 0; number < 40; number++) {
    await keeper.append(Buffer.from('. '));
    effects.advance(50);
    await settled();
  }
  t.equal(appends.length, 1 + 2 * 5);
});

t.test('output during a slow write is written 200 ms after it', async (t) => {
  const written = Promise.withResolvers<void>();
  const { keeper, appends, effects } = keeperFor({ write: () => written.promise });
  await keeper.append(Buffer.from('one'));
  effects.advance(200);
  await keeper.append(Buffer.from('two'));
  effects.advance(200);
  t.strictSame(texts(appends), [['one']]);
  written.resolve();
  await settled();
  effects.advance(200);
  t.strictSame(texts(appends), [['one'], ['two']]);
});

t.test('a log that ends with the beginning of a secret is kept to its end', async (t) => {
  const { keeper, appends } = keeperFor({ secrets: ['a secret value'] });
  await keeper.append(Buffer.from('this is a secret'));
  await keeper.end();
  t.equal(texts(appends).flat().join(''), 'this is a secret');
});

t.test('notes of davit stand on their own line, whatever was printed last', async (t) => {
  const logAfter = async (...printed: string[]) => {
    const { keeper, appends } = keeperFor({ secrets: ['a secret value'] });
    for (const text of printed) await keeper.append(Buffer.from(text));
    await keeper.appendLine('davit: one');
    await keeper.appendLine('davit: two');
    await keeper.end();
    return texts(appends).flat().join('');
  };
  t.equal(await logAfter(), 'davit: one\ndavit: two\n');
  t.equal(await logAfter('a line\n', ''), 'a line\ndavit: one\ndavit: two\n');
  t.equal(await logAfter('no line', ''), 'no line\ndavit: one\ndavit: two\n');
  t.equal(await logAfter('a secret'), 'a secret\ndavit: one\ndavit: two\n', 'also behind what was held back');
});

t.test('a full chunk is written at once', async (t) => {
  const { keeper, appends } = keeperFor();
  await keeper.append(Buffer.alloc(64 * KIB, 'x'));
  t.strictSame(shapes(appends), [[[0, 64 * KIB]]]);
  await keeper.end();
});

t.test('a log is cut into chunks, one of which ends exactly with the head', async (t) => {
  const { keeper, appends } = keeperFor({ headBytes: 100_000 });
  await keeper.append(Buffer.alloc(200_000, 'x'));
  await keeper.end();
  t.strictSame(shapes(appends), [
    [
      [0, 65_536],
      [65_536, 34_464],
      [100_000, 65_536],
      [165_536, 34_464],
    ],
  ]);
});

t.test('chunks that the tail no longer needs are dropped', async (t) => {
  const { keeper, appends, effects } = keeperFor({ headBytes: 10, tailBytes: 20 });
  for (let number = 0; number < 5; number++) {
    await keeper.append(Buffer.alloc(10, 'x'));
    effects.advance(200);
    await settled();
  }
  t.strictSame(
    appends.map(({ dropTailBefore }) => dropTailBefore),
    [null, null, null, 20, 30],
  );
  t.strictSame(
    keptOf(appends).map(({ start }) => start),
    [0, 30, 40],
  );
});

t.test('a slow writer is waited for once 1 MiB is buffered', async (t) => {
  const written = Promise.withResolvers<void>();
  const { keeper, appends } = keeperFor({ write: () => written.promise });
  const appended: number[] = [];
  const all = Promise.all(
    Array.from({ length: 40 }, async (_, number) => {
      await keeper.append(Buffer.alloc(64 * KIB, 'x'));
      appended.push(number);
    }),
  );
  await settled();
  t.equal(appends.length, 1);
  t.equal(
    appended.length,
    16,
    'one chunk is being written, 15 wait; the next fills the MiB, and its writer waits',
  );
  written.resolve();
  await all;
  await keeper.end();
  t.match(appends.at(-1), { logBytes: 40 * 64 * KIB });
});

t.test('what is printed byte by byte is kept in few pieces, unchanged', async (t) => {
  const { keeper, appends } = keeperFor();
  const text = 'davit '.repeat(5_000);
  collectGarbage();
  const before = process.memoryUsage().heapUsed;
  for (const byte of Buffer.from(text)) await keeper.append(Buffer.of(byte));
  collectGarbage();
  const grownBytes = process.memoryUsage().heapUsed - before;
  t.ok(grownBytes < 3e6, `${grownBytes} for ${text.length} pieces`);
  await keeper.end();
  t.strictSame(texts(appends), [[text]]);
});

t.test('told to wait no more, it does not wait for a slow writer', async (t) => {
  const written = Promise.withResolvers<void>();
  const { keeper, appends } = keeperFor({ write: () => written.promise });
  await keeper.append(Buffer.alloc(64 * KIB, 'x')); // is being written
  const waiting = keeper.append(Buffer.alloc(1024 * KIB, 'x'));
  keeper.waitNoMore();
  await waiting;
  await keeper.append(Buffer.alloc(64 * KIB, 'x'));
  t.equal(appends.length, 1);
  written.resolve();
  await keeper.end();
  t.match(appends.at(-1), { logBytes: 1152 * KIB });
});

t.test('a failed write rejects the append', async (t) => {
  const failure = new Error('the disk is full');
  const { keeper, appends } = keeperFor({ write: () => Promise.reject(failure) });
  await keeper.append(Buffer.alloc(64 * KIB, 'x'));
  await settled();
  await t.rejects(keeper.append(Buffer.from('more')), failure);
  await t.rejects(keeper.end(), failure);
  t.equal(appends.length, 1);
});

t.test('the head and the tail of any log are kept at their true offsets', async (t) => {
  const property = fc.asyncProperty(
    fc.array(fc.record({ size: fc.nat(3000), isGathered: fc.boolean() }), { maxLength: 60 }),
    fc.integer({ min: 1, max: 5000 }),
    fc.integer({ min: 1, max: 20_000 }),
    async (writes, headBytes, tailBytes) => {
      const { keeper, appends, effects } = keeperFor({ headBytes, tailBytes });
      const printed: Buffer[] = [];
      for (const { size, isGathered } of writes) {
        printed.push(Buffer.alloc(size, String(printed.length)));
        await keeper.append(printed.at(-1) ?? Buffer.alloc(0));
        if (isGathered) effects.advance(200);
        await settled();
      }
      await keeper.end();

      const whole = Buffer.concat(printed);
      const kept = keptOf(appends);
      const head = kept.filter(({ start }) => start < headBytes);
      const tail = kept.filter(({ start }) => start >= headBytes);
      const tailStart = tail[0]?.start ?? whole.length;
      assert.deepEqual(joined(head), whole.subarray(0, headBytes));
      assert.deepEqual(joined(tail), whole.subarray(tailStart));
      assert.ok(whole.length <= headBytes || tailStart <= Math.max(headBytes, whole.length - tailBytes));
      assert.ok(tailStart + (tail[0]?.bytes.length ?? 1) > whole.length - tailBytes, 'no chunk too many');
      assert.equal(appends.at(-1)?.logBytes ?? 0, whole.length);
      const drops = appends.map(({ dropTailBefore }) => dropTailBefore).filter((drop) => drop !== null);
      assert.equal(drops.length > 0, tailStart > headBytes);
      assert.deepEqual(drops, [...new Set(drops)], 'nothing is dropped twice');
    },
  );
  await t.resolves(fc.assert(property, { numRuns: 300 }));
});

t.test('in the database a long log has its first 256 KiB and its last 5 MiB', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const projectId = await store.project();
  const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
  const [headBytes, tailBytes] = [256 * KIB, 5 * 1024 * KIB];
  const keeper = createLogKeeper({
    secrets: ['top-secret-token'],
    effects,
    write: (append) => store.writer.write('logs.append', { id, ...append }),
  });
  const line = Buffer.from(`${'.'.repeat(83)} top-secret-token\n`);
  const lines = 200_000;
  for (let number = 0; number < lines; number++) await keeper.append(line);
  await keeper.end();

  const keptLine = Buffer.from(`${'.'.repeat(83)} ***\n`);
  const total = lines * keptLine.length;
  t.strictSame(store.query('SELECT log_bytes, log_truncated FROM deployments'), [
    { log_bytes: total, log_truncated: 1 },
  ]);
  const chunks = store.query<{ start: number; bytes: Buffer }>(
    'SELECT start, bytes FROM log_chunks ORDER BY start',
  );
  const whole = Buffer.alloc(total, keptLine);
  for (const { start, bytes } of chunks) {
    if (!bytes.equals(whole.subarray(start, start + bytes.length))) t.fail(`chunk at ${start}`);
  }
  const size = (from: number, to: number) =>
    chunks
      .filter(({ start }) => start >= from && start < to)
      .reduce((sum, { bytes }) => sum + bytes.length, 0);
  t.equal(size(0, headBytes), headBytes);
  const tailSize = size(headBytes, total);
  t.ok(tailSize >= tailBytes && tailSize < tailBytes + 64 * KIB, `the tail has ${tailSize} bytes`);
});

interface Kept {
  keeper: LogKeeper;
  appends: Omit<LogAppend, 'id'>[];
  effects: ReturnType<typeof fakeEffects>;
}

function keeperFor(
  options: { headBytes?: number; tailBytes?: number; secrets?: string[]; write?: () => Promise<void> } = {},
): Kept {
  const { secrets = [], write = async () => undefined } = options;
  const effects = fakeEffects();
  const appends: Omit<LogAppend, 'id'>[] = [];
  const keeper = createLogKeeper({
    ...options,
    secrets,
    effects,
    write(append) {
      appends.push(append);
      return write();
    },
  });
  return { keeper, appends, effects };
}

/** What the store holds after these, as LogAppend describes it. */
function keptOf(appends: Omit<LogAppend, 'id'>[]): LogAppend['chunks'] {
  let kept: LogAppend['chunks'] = [];
  for (const { chunks, dropTailBefore, headBytes } of appends) {
    kept = [...kept, ...chunks].filter(
      ({ start, bytes }) =>
        start < headBytes || dropTailBefore === null || start + bytes.length > dropTailBefore,
    );
  }
  return kept;
}

function joined(chunks: LogAppend['chunks']): Buffer {
  return Buffer.concat(chunks.map(({ bytes }) => bytes));
}

function texts(appends: Omit<LogAppend, 'id'>[]): string[][] {
  return appends.map(({ chunks }) => chunks.map(({ bytes }) => Buffer.from(bytes).toString()));
}

function shapes(appends: Omit<LogAppend, 'id'>[]): number[][][] {
  return appends.map(({ chunks }) => chunks.map(({ start, bytes }) => [start, bytes.length]));
}

/** Lets what waits for promises go on. */
async function settled(): Promise<void> {
  for (let turn = 0; turn < 10; turn++) await Promise.resolve();
}
