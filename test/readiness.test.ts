import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { createReadiness } from '../src/readiness.ts';
import { fakeEffects } from './helpers/effects.ts';

const QUIET_MS = 10_000;
const HANGS_MS = QUIET_MS + 1;

t.test('a service that does its work is ready, until it stops', async (t) => {
  const stopping = new AbortController();
  const { readiness } = service({ dispatcherQuietMs: async () => QUIET_MS, stopping: stopping.signal });
  readiness.watch({ quietMs: () => QUIET_MS });
  t.equal(await readiness.check(), null);
  stopping.abort();
  t.equal(await readiness.check(), 'the service is stopping');
});

t.test('a service that cannot work is not ready, and says why', async (t) => {
  const refused = () => Promise.reject(new Error('no room'));
  t.equal(await service({ probe: refused }).readiness.check(), 'the database takes no writes');
  t.equal(await service({ problem: () => 'not yet' }).readiness.check(), 'not yet');
  const { readiness } = service();
  readiness.watch({ quietMs: () => HANGS_MS });
  t.equal(await readiness.check(), 'the executor hangs');
  const dispatcherQuietMs = async () => HANGS_MS;
  t.equal(await service({ dispatcherQuietMs }).readiness.check(), 'the dispatcher hangs');
});

t.test('a part that does not answer within 10 s makes the service not ready', async (t) => {
  const never = () => new Promise<never>(() => undefined);
  for (const [parts, problem] of [
    [{ probe: never }, 'the database takes no writes'],
    [{ dispatcherQuietMs: never }, 'the dispatcher hangs'],
  ] as const) {
    const { readiness, effects } = service(parts);
    const checked = readiness.check();
    await nextTurn();
    effects.advance(HANGS_MS);
    t.equal(await checked, problem);
  }
});

t.test('while a part does not answer, it is not asked again', async (t) => {
  const asked = { probe: 0, dispatcherQuietMs: 0 };
  const waiting: (() => void)[] = [];
  const slowly = (part: keyof typeof asked) => () => {
    asked[part] += 1;
    return new Promise<number>((resolve) => waiting.push(() => resolve(0)));
  };
  for (const part of ['probe', 'dispatcherQuietMs'] as const) {
    const { readiness, effects } = service({ [part]: slowly(part) });
    const checks = [];
    for (let second = 0; second < 5; second += 1) {
      checks.push(readiness.check());
      await nextTurn();
      effects.advance(1_001);
    }
    t.equal(asked[part], 1);
    for (const answer of waiting.splice(0)) answer();
    t.strictSame(await Promise.all(checks), [null, null, null, null, null]);
    void readiness.check();
    await nextTurn();
    t.equal(asked[part], 2, 'once it has answered, it is');
    for (const answer of waiting.splice(0)) answer();
  }
});

t.test('a database that is not in its place makes the service not ready', async (t) => {
  // Its writes fail, too, but that is said only of a database in its place.
  const probe = () => Promise.reject(new Error('it was moved'));
  const { readiness } = service({ isInPlace: () => false, probe });
  t.equal(await readiness.check(), 'the database was moved, removed or replaced, or is out of reach');
});

t.test('one check serves all requests within a second', async (t) => {
  let looks = 0;
  const probe = async () => {
    looks += 1;
  };
  const { readiness, effects } = service({ probe });
  effects.advance(60_000);
  await Promise.all([readiness.check(), readiness.check()]);
  effects.advance(1_000);
  await readiness.check();
  t.equal(looks, 1);
  effects.advance(1);
  await readiness.check();
  t.equal(looks, 2);
});

/** The readiness of a service in which all is well, but for `parts`. */
function service(parts: Partial<Parameters<typeof createReadiness>[0]> = {}) {
  const effects = fakeEffects();
  const well = {
    probe: async () => undefined,
    problem: () => null,
    dispatcherQuietMs: async () => 0,
    stopping: new AbortController().signal,
  };
  return { effects, readiness: createReadiness({ isInPlace: () => true, effects, ...well, ...parts }) };
}
