import fc from 'fast-check';
import t, { type Test } from 'tap';
import { createLogKeeper } from '../../src/deploy/log.ts';
import type { DeploymentId } from '../../src/domain.ts';
import { leftOutMarker, logWrites } from '../../src/store/logs.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { appendTo, newDeployment, preparedBy, type TestStore, testStore } from '../helpers/store.ts';

t.test('a log is read back as it was printed, from any byte to any other', async (t) => {
  const { store, id } = await deployment(t);
  const bytes = Buffer.from(Array.from({ length: 256 * 700 }, (_, index) => index % 256));
  await append(store, id, [bytes.subarray(0, 1), bytes.subarray(1, 65_537), bytes.subarray(65_537)]);
  const ends = [0, 1, 2, 65_536, 65_537, 65_538, 100_000, bytes.length];
  for (const from of ends) {
    for (const end of ends) {
      t.ok(
        textOf(store, id, from, end).equals(bytes.subarray(from, Math.max(from, end))),
        `${from} to ${end}`,
      );
    }
  }
});

t.test('a log is read in parts of at most 16 KiB', async (t) => {
  const { store, id } = await deployment(t);
  await append(store, id, [Buffer.alloc(64 * 1024, 'a'), Buffer.alloc(100_000, 'b')]);
  const sizes = [...store.reads.logs.text(id, 10, 164_000)].map(({ length }) => length);
  t.ok(Math.max(...sizes) <= 16 * 1024);
  t.ok(sizes.length < 15);
});

t.test('a line says how many bytes were left out of a log', async (t) => {
  // What was kept of the log, with a dot for each byte that was left out.
  const rows: [name: string, kept: string, from: number, text: string][] = [
    ['in the middle of a line', 'ab......ij', 0, `ab\n${marker(6)}ij`],
    ['after a line', 'a\n......ij', 0, `a\n${marker(6)}ij`],
    ['from the first byte that is missing', 'ab......ij', 2, `\n${marker(6)}ij`],
    ['the same after a line', 'a\n......ij', 2, `${marker(6)}ij`],
    ['from within', 'ab......ij', 5, `${marker(3)}ij`],
    ['from the last byte that is missing', 'ab......ij', 7, `${marker(1)}ij`],
    ['from the first that was kept again', 'ab......ij', 8, 'ij'],
    ['nothing but a beginning', 'ab......', 0, `ab\n${marker(6)}`],
    ['nothing but an end', '......ij', 0, `${marker(6)}ij`],
    ['nothing at all', '......', 1, marker(5)],
    ['twice', 'a..d..g', 0, `a\n${marker(2)}d\n${marker(2)}g`],
  ];
  for (const [name, kept, from, text] of rows) {
    const { store, id } = await deployment(t);
    for (const { index, 0: piece } of kept.matchAll(/[^.]+/g)) {
      store.execute(`INSERT INTO log_chunks VALUES ('${id}', ${index}, CAST('${piece}' AS BLOB))`);
    }
    t.equal(textOf(store, id, from, kept.length).toString(), text, name);
  }
});

t.test('no blank line comes between two such lines, if more is left out while the log is read', async (t) => {
  const { store, id } = await deployment(t);
  for (const [start, piece] of [
    ['0', 'ab'],
    ['4', 'ef'],
    ['8', 'ij'],
  ]) {
    store.execute(`INSERT INTO log_chunks VALUES ('${id}', ${start}, CAST('${piece}' AS BLOB))`);
  }
  let text = '';
  for (const bytes of store.reads.logs.text(id, 0, 10)) {
    text += bytes;
    if (text.endsWith(marker(2))) store.execute('DELETE FROM log_chunks WHERE start = 4');
  }
  t.equal(text, `ab\n${marker(2)}${marker(4)}ij`);
});

t.test('offsets count every byte that was printed, whatever was left out', async (t) => {
  const effects = fakeEffects();
  await fc.assert(
    fc.asyncProperty(
      fc.array(fc.integer({ min: 1, max: 40 }), { minLength: 1, maxLength: 12 }),
      fc.integer({ min: 1, max: 40 }),
      fc.integer({ min: 1, max: 60 }),
      fc.nat({ max: 500 }),
      async (sizes, headBytes, tailBytes, from) => {
        const { store, id } = await deployment(t);
        const keeper = createLogKeeper({
          headBytes,
          tailBytes,
          secrets: [],
          effects,
          write: (piece) => store.writer.write('logs.append', { id, ...piece }),
        });
        let printed = Buffer.alloc(0);
        for (const size of sizes) {
          const bytes = Buffer.alloc(size, 'abcdefghij');
          printed = Buffer.concat([printed, bytes]);
          await keeper.append(bytes);
          effects.advance(1_000);
        }
        await keeper.end();
        const text = textOf(store, id, from, printed.length).toString();
        const markers = [...text.matchAll(/\n?\[davit: (\d+) bytes left out\]\n/g)];
        const missing = markers.reduce((sum, [, count]) => sum + Number(count), 0);
        const shown = text.length - markers.reduce((sum, [all]) => sum + all.length, 0);
        const [first = text] = text.split(/\n?\[davit/);
        const last = text.slice(text.lastIndexOf('\n') + 1);
        return (
          shown + missing === Math.max(0, printed.length - from) &&
          printed.subarray(from).toString().startsWith(first) &&
          printed.toString().endsWith(last)
        );
      },
    ),
    { numRuns: 60 },
  );
  t.pass();
});

t.test(
  'only whole chunks are dropped from the tail, and each append notifies those who follow the log',
  async (t) => {
    const { store, id } = await deployment(t);
    const heard: string[] = [];
    store.writer.onCommit((changes) => heard.push(...changes));
    await append(store, id, Array(4).fill(Buffer.from('0123456789')));
    const drop = { id, chunks: [], logBytes: 40, headBytes: 10 };
    const rows: [dropTailBefore: number | null, starts: number[]][] = [
      [null, [0, 10, 20, 30]],
      [19, [0, 10, 20, 30]],
      [20, [0, 20, 30]],
      [39, [0, 30]],
    ];
    for (const [dropTailBefore, starts] of rows) {
      await store.writer.write('logs.append', { ...drop, dropTailBefore });
      const left = store.query<{ start: number }>('SELECT start FROM log_chunks ORDER BY start');
      t.strictSame(
        left.map(({ start }) => start),
        starts,
      );
      t.equal(store.reads.deployments.existing(id).log_truncated, dropTailBefore !== null);
    }
    await store.writer.write('logs.append', { ...drop, dropTailBefore: null });
    t.equal(store.reads.deployments.existing(id).log_truncated, true, 'for good');
    t.strictSame(heard, Array(6).fill(`log:${id}`));
  },
);

t.test('dropping the oldest chunks reads none that stay', async (t) => {
  const store = testStore(t);
  const database = store.openReader();
  const dropped: string[] = [];
  const spied = preparedBy(database, (sql) => {
    if (sql.includes('DELETE')) dropped.push(sql);
    return database.prepare(sql);
  });
  logWrites({ database: spied, effects: fakeEffects(), changed: () => undefined });
  t.match(
    dropped.flatMap((sql) =>
      database.prepare(`EXPLAIN QUERY PLAN ${sql}`).all({ id: 'dpl_1', headBytes: 1, dropTailBefore: 2 }),
    ),
    [{ detail: /\(deployment_id=\? AND start>\? AND start<\?\)$/ }],
  );
});

t.test('a line stands for chunks that are dropped while the log is read', async (t) => {
  const { store, id } = await deployment(t);
  await append(store, id, [Buffer.from('one'), Buffer.from('two'), Buffer.from('three')]);
  const reading = store.reads.logs.text(id, 0, 11);
  t.equal(String(reading.next().value), 'one');
  store.execute('DELETE FROM log_chunks WHERE start < 6');
  t.strictSame([...reading].map(String), [`\n${marker(3)}`, 'three']);
});

t.test('a log has nothing of another deployment', async (t) => {
  const { store, id } = await deployment(t);
  const other = await store.writer.write('deployments.create', newDeployment(await store.project()));
  await append(store, other.id, [Buffer.from('sec'), Buffer.from('ret')]);
  t.equal(textOf(store, id, 0, 6).toString(), marker(6));
});

function marker(bytes: number): string {
  return leftOutMarker(bytes, false);
}

async function deployment(t: Test): Promise<{ store: TestStore; id: DeploymentId }> {
  const store = testStore(t);
  const { id } = await store.writer.write('deployments.create', newDeployment(await store.project()));
  return { store, id };
}

async function append(store: TestStore, id: DeploymentId, pieces: Buffer[]): Promise<void> {
  let end = 0;
  const chunks = pieces.map((bytes) => {
    const start = end;
    end += bytes.length;
    return { start, bytes };
  });
  await store.writer.write('logs.append', appendTo(id, chunks));
}

function textOf(store: TestStore, id: DeploymentId, from: number, end: number): Buffer {
  return Buffer.concat([...store.reads.logs.text(id, from, end)]);
}
