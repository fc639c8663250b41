import type { LookupAddress } from 'node:dns';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { createResolver } from '../../src/deliver/resolver.ts';
import { fakeEffects } from '../helpers/effects.ts';

const ANSWER: LookupAddress[] = [{ address: '93.184.216.34', family: 4 }];
const PATIENCE_MS = 10_000;

t.test('concurrent requests for a name share one lookup', async (t) => {
  const { resolve, asked, answer } = newResolver();
  const both = Promise.all([resolve('one.example', 'unproven'), resolve('one.example', 'unproven')]);
  await nextTurn();
  t.strictSame(asked, ['one.example']);
  answer('one.example');
  t.strictSame(await both, [ANSWER, ANSWER]);
  const again = resolve('one.example', 'unproven');
  await nextTurn();
  t.strictSame(asked, ['one.example', 'one.example'], 'nothing is kept: names change');
  answer('one.example');
  await again;
});

t.test('dead names delay neither known names nor new ones of receivers that do not fail', async (t) => {
  const { resolve, asked, answer } = newResolver();
  const known = resolve('known.example', 'unproven');
  await nextTurn();
  answer('known.example');
  await known;
  for (const number of Array(40).keys()) void resolve(`dead${number}.example`, 'failing');
  await nextTurn();
  t.equal(asked.length, 1 + 8, 'only a few are asked for at a time');
  for (const name of ['known.example', 'new.example']) {
    const look = resolve(name, 'unproven');
    await nextTurn();
    t.equal(asked.at(-1), name);
    answer(name);
    t.strictSame(await look, ANSWER);
  }
  // A receiver may fail for other reasons.
  const failing = resolve('known.example', 'failing');
  await nextTurn();
  t.equal(asked.at(-1), 'known.example');
  answer('known.example');
  await failing;
  for (const number of Array(40).keys()) void resolve(`fresh${number}.example`, 'unproven');
  await nextTurn();
  t.equal(asked.length, 12 + 8, 'of new ones few are asked for at a time, too');
});

t.test('names of proven receivers have lookups reserved', async (t) => {
  const { resolve, asked, answer } = newResolver();
  for (const number of Array(40).keys()) void resolve(`new${number}.example`, 'unproven');
  for (const number of Array(40).keys()) void resolve(`failing${number}.example`, 'failing');
  const look = resolve('proven.example', 'proven');
  await nextTurn();
  t.ok(asked.includes('proven.example'));
  answer('proven.example');
  t.strictSame(await look, ANSWER);
  for (const number of Array(40).keys()) void resolve(`proven${number}.example`, 'proven');
  await nextTurn();
  t.equal(asked.length, 1 + 3 * 8, 'and no more than that');
});

t.test('a name that resolves late counts as new until it resolves in time', async (t) => {
  const { resolve, asked, answer, effects } = newResolver();
  const names = Array.from({ length: 9 }, (_, number) => `slow${number}.example`);
  for (const name of names) {
    const look = resolve(name, 'unproven');
    await nextTurn();
    effects.advance(2_000);
    answer(name);
    await look;
  }
  asked.length = 0;
  const looks = Promise.all(names.map((name) => resolve(name, 'unproven')));
  await nextTurn();
  t.equal(asked.length, 8);
  for (const name of names) {
    answer(name);
    await nextTurn();
  }
  await looks;
  asked.length = 0;
  const again = Promise.all(names.map((name) => resolve(name, 'unproven')));
  await nextTurn();
  t.equal(asked.length, 9);
  for (const name of names) answer(name);
  await again;
});

t.test('a name that nobody waits for any more is not looked up', async (t) => {
  const { resolve, asked, answer, effects } = newResolver();
  const dead = Array.from({ length: 8 }, (_, number) => `dead${number}.example`);
  const first = Promise.all(dead.map((name) => resolve(name, 'unproven')));
  const left = resolve('left.example', 'unproven');
  const wanted = resolve('wanted.example', 'unproven');
  await nextTurn();
  effects.advance(PATIENCE_MS);
  void resolve('wanted.example', 'unproven');
  effects.advance(1);
  for (const name of dead) answer(name);
  await first;
  await t.rejects(left, { message: 'its callers have given up' });
  t.strictSame(asked.slice(8), ['wanted.example']);
  answer('wanted.example');
  t.strictSame(await wanted, ANSWER);
});

t.test('a known name that resolves late counts as new from then on', async (t) => {
  const { resolve, asked, answer, effects } = newResolver();
  for (const lateMs of [0, 2_000]) {
    const look = resolve('known.example', 'unproven');
    await nextTurn();
    effects.advance(lateMs);
    answer('known.example');
    await look;
    await nextTurn(); // the late one has what the name stood for before its own answer is looked at
  }
  for (const number of Array(8).keys()) void resolve(`dead${number}.example`, 'unproven');
  void resolve('known.example', 'unproven');
  await nextTurn();
  t.equal(asked.length, 2 + 8);
  t.not(asked.at(-1), 'known.example');
});

t.test('the last answer for a name is used while no server answers', async (t) => {
  const { resolve, asked, answer, effects } = newResolver();
  const first = resolve('one.example', 'proven');
  await nextTurn();
  answer('one.example');
  await first;
  const silent = resolve('one.example', 'proven');
  const fresh = resolve('two.example', 'proven');
  effects.advance(1_799);
  t.equal(await Promise.race([silent, nextTurn('none yet')]), 'none yet');
  effects.advance(1);
  t.strictSame(await silent, ANSWER);
  t.equal(await Promise.race([fresh, nextTurn('none')]), 'none', 'of another nothing is known');
  const again = resolve('one.example', 'proven');
  t.equal(asked.length, 3, 'the look that is under way is shared');
  effects.advance(1_800);
  t.strictSame(await again, ANSWER);
  effects.advance(60 * 60_000);
  const late = resolve('one.example', 'proven');
  effects.advance(1_800);
  t.equal(await Promise.race([late, nextTurn('none')]), 'none', 'but not for ever');
});

t.test('a lookup asks for all addresses of a name', async (t) => {
  const resolve = createResolver(undefined, PATIENCE_MS, fakeEffects());
  const addresses = await resolve('localhost', 'unproven');
  t.ok(addresses.length > 0);
  for (const { address } of addresses) t.match(address, /^(127\.|::1$)/);
});

/** A resolver on one that answers when a test says so. */
function newResolver() {
  const effects = fakeEffects();
  const asked: string[] = [];
  const waiting = new Map<string, PromiseWithResolvers<LookupAddress[]>>();
  const resolve = createResolver(
    (hostname) => {
      asked.push(hostname);
      const look = Promise.withResolvers<LookupAddress[]>();
      waiting.set(hostname, look);
      return look.promise;
    },
    PATIENCE_MS,
    effects,
  );
  return { effects, resolve, asked, answer: (hostname: string) => waiting.get(hostname)?.resolve(ANSWER) };
}
