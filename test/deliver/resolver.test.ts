import type { LookupAddress } from 'node:dns';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { createResolver } from '../../src/deliver/resolver.ts';
import { fakeEffects } from '../helpers/effects.ts';

const ANSWER: LookupAddress[] = [{ address: '93.184.216.34', family: 4 }];

t.test('those who ask for a name at the same time share one look', async (t) => {
  const { resolve, asked, answer } = newResolver();
  const both = Promise.all([resolve('one.example'), resolve('one.example')]);
  await nextTurn();
  t.strictSame(asked, ['one.example']);
  answer('one.example');
  t.strictSame(await both, [ANSWER, ANSWER]);
  const again = resolve('one.example');
  await nextTurn();
  t.strictSame(asked, ['one.example', 'one.example'], 'nothing is kept: names change');
  answer('one.example');
  await again;
});

t.test(
  'names that nobody answers for hold up neither those that are known nor those that are new',
  async (t) => {
    const { resolve, asked, answer, effects } = newResolver();
    const known = resolve('known.example');
    await nextTurn();
    answer('known.example');
    await known;
    const dead = Array.from({ length: 40 }, (_, number) => `dead${number}.example`);
    const looks = Promise.allSettled(dead.map(resolve));
    await nextTurn();
    t.equal(asked.length, 1 + 8, 'of the new ones only a few are asked for at a time');
    const meanwhile = resolve('known.example');
    await nextTurn();
    t.equal(asked.at(-1), 'known.example');
    answer('known.example');
    await meanwhile;

    for (let done = 0; done < dead.length; done += 8) {
      effects.advance(10_000);
      for (const name of dead.slice(done, done + 8)) answer(name, new Error('EAI_AGAIN'));
      await nextTurn();
    }
    t.match(
      await looks,
      dead.map(() => ({ status: 'rejected', reason: { message: 'EAI_AGAIN' } })),
    );

    asked.length = 0;
    for (const name of dead) resolve(name).catch(() => undefined);
    await nextTurn();
    t.equal(asked.length, 8, 'and once they are known for it they have a share of their own');
    const fresh = resolve('new.example');
    await nextTurn();
    t.equal(asked.at(-1), 'new.example');
    answer('new.example');
    t.strictSame(await fresh, ANSWER);
  },
);

t.test('a name that is answered for again is like any other', async (t) => {
  const { resolve, asked, answer, effects } = newResolver();
  const names = Array.from({ length: 9 }, (_, number) => `slow${number}.example`);
  for (const name of names) {
    const look = resolve(name);
    await nextTurn();
    effects.advance(2_000);
    answer(name);
    await look;
    const again = resolve(name);
    await nextTurn();
    answer(name);
    await again;
  }
  asked.length = 0;
  const looks = Promise.all(names.map(resolve));
  await nextTurn();
  t.strictSame(asked, names);
  for (const name of names) answer(name);
  await looks;
});

/** A resolver on one that answers when a test says so. */
function newResolver() {
  const effects = fakeEffects();
  const asked: string[] = [];
  const waiting = new Map<string, PromiseWithResolvers<LookupAddress[]>>();
  const resolve = createResolver((hostname) => {
    asked.push(hostname);
    const look = Promise.withResolvers<LookupAddress[]>();
    waiting.set(hostname, look);
    return look.promise;
  }, effects);
  return {
    effects,
    resolve,
    asked,
    answer(hostname: string, error?: Error) {
      const look = waiting.get(hostname);
      if (error === undefined) look?.resolve(ANSWER);
      else look?.reject(error);
    },
  };
}
