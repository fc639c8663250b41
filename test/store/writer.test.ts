import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { AppError } from '../../src/errors.ts';
import { type Writer, writePersistently } from '../../src/store/writer.ts';
import { fakeEffects } from '../helpers/effects.ts';

t.test('writePersistently retries an unavailable write each second, and reports it once', async (t) => {
  const effects = fakeEffects();
  const unavailable = new AppError('unavailable', 'the disk is full');
  const refusals: unknown[] = [];
  let writes = 0;
  const write = async () => {
    writes += 1;
    if (writes < 4) throw unavailable;
    return 'written';
  };
  const writer = { write } as unknown as Writer;
  const written = writePersistently(writer, 'instance.probe', undefined, effects, (error) =>
    refusals.push(error),
  );
  for (const expected of [1, 2, 3]) {
    await nextTurn();
    t.equal(writes, expected);
    effects.advance(1_000);
  }
  t.equal(await written, 'written');
  t.strictSame(refusals, [unavailable]);
});

t.test('writePersistently does not retry a write that was rejected for another reason', async (t) => {
  const conflict = new AppError('conflict', 'it has ended');
  let writes = 0;
  const write = async () => {
    writes += 1;
    throw conflict;
  };
  const writer = { write } as unknown as Writer;
  const refused = () => t.fail('a conflict was reported as unavailable');
  await t.rejects(writePersistently(writer, 'instance.probe', undefined, fakeEffects(), refused), conflict);
  t.equal(writes, 1);
});
