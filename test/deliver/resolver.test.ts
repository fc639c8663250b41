import type { LookupAddress } from 'node:dns';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import { createResolver } from '../../src/deliver/resolver.ts';
import type { KeyId } from '../../src/domain.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { ifMayServeDns, runWithOwnDns } from '../helpers/namespaces.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const ANSWER: LookupAddress[] = [{ address: '93.184.216.34', family: 4 }];
const PATIENCE_MS = 10_000;
const KEY = 'one' as KeyId;
const OTHER_KEY = 'other' as KeyId;

t.test('concurrent requests for a name share one lookup', async (t) => {
  const { resolve, asked, answer } = newResolver();
  const both = Promise.all([resolve('one.example', KEY), resolve('one.example', KEY)]);
  await nextTurn();
  t.strictSame(asked, ['one.example']);
  answer('one.example');
  t.strictSame(await both, [ANSWER, ANSWER]);
  const again = resolve('one.example', KEY);
  await nextTurn();
  t.strictSame(asked, ['one.example', 'one.example'], 'nothing is kept: names change');
  answer('one.example');
  await again;
});

t.test('names for which DNS does not answer are looked up a few at a time', async (t) => {
  const { resolve, know, asked, answer } = newResolver();
  await know('known.example');
  asked.length = 0;
  for (const number of Array(100).keys()) void resolve(`dead${number}.example`, KEY);
  await nextTurn();
  t.equal(asked.length, 6);
  for (const number of Array(100).keys()) void resolve(`dead${number}.example`, OTHER_KEY);
  await nextTurn();
  t.equal(asked.length, 7);
  const look = resolve('known.example', KEY);
  await nextTurn();
  t.equal(asked.at(-1), 'known.example', 'but one that was answered quickly at once');
  answer('known.example');
  t.strictSame(await look, ANSWER);
});

t.test('a name for which DNS answers does not wait for those for which it does not', async (t) => {
  const { resolve, asked, answer, answerByDns } = newResolver();
  for (const number of Array(100).keys()) void resolve(`dead${number}.example`, KEY);
  const look = resolve('new.example', KEY);
  await nextTurn();
  t.notOk(asked.includes('new.example'));
  answerByDns('new.example');
  await nextTurn();
  t.equal(asked.at(-1), 'new.example', 'as the system may know more than DNS');
  answer('new.example');
  t.strictSame(await look, ANSWER);
});

t.test('names of one key leave lookups to those of others, whatever DNS says of them', async (t) => {
  const { resolve, asked, answerByDns } = newResolver();
  const names = Array.from({ length: 100 }, (_, number) => `lying${number}.example`);
  for (const name of names) void resolve(name, KEY);
  await nextTurn();
  for (const name of names) answerByDns(name);
  await nextTurn();
  t.equal(asked.length, 6 + 19);
  for (const name of ['silent.example', 'new.example']) void resolve(name, OTHER_KEY);
  await nextTurn();
  answerByDns('new.example');
  await nextTurn();
  t.strictSame(asked.slice(6 + 19), ['silent.example', 'new.example']);
  void resolve(names.at(-1) ?? '', OTHER_KEY);
  await nextTurn();
  answerByDns(names.at(-1) ?? '');
  await nextTurn();
  t.equal(asked.at(-1), names.at(-1), 'even for a name that also the first one waits for');
});

t.test('a turn among names without an answer is given back once, also if it comes too late', async (t) => {
  const { resolve, asked, answer, answerByDns } = newResolver();
  const silent = ['0', '1', '2', '3', '4', '5', 'in turn'].map((name) => `${name}.example`);
  const looks = [...silent, 'new.example'].map((name) => resolve(name, KEY));
  await nextTurn();
  answerByDns('new.example');
  for (const name of ['new.example', ...silent]) {
    await nextTurn();
    answer(name);
  }
  await Promise.all(looks);
  asked.length = 0;
  for (const number of Array(100).keys()) void resolve(`next${number}.example`, KEY);
  await nextTurn();
  t.equal(asked.length, 6);
});

t.test('where few threads are allowed, names without an answer leave one to the others', async (t) => {
  const { resolve, asked, answerByDns } = newResolver({ lookupsMax: 2 });
  for (const key of [KEY, OTHER_KEY])
    for (const number of Array(9).keys()) void resolve(`dead${number}.example`, key);
  void resolve('new.example', KEY);
  await nextTurn();
  answerByDns('new.example');
  await nextTurn();
  t.strictSame(asked, ['dead0.example', 'new.example']);
});

t.test('a name that DNS is silent about is looked up in its turn', async (t) => {
  const { resolve, asked, answer, beSilent } = newResolver();
  const names = Array.from({ length: 7 }, (_, number) => `hosts${number}.example`);
  const looks = names.map((name) => resolve(name, KEY));
  await nextTurn();
  beSilent('hosts6.example');
  await nextTurn();
  t.equal(asked.length, 6);
  for (const [index, name] of names.entries()) {
    answer(name);
    t.strictSame(await looks[index], ANSWER);
  }
});

t.test('a name that DNS was silent about is asked about again when it is wanted again', async (t) => {
  const { resolve, asked, questions, answerByDns, beSilent } = newResolver();
  for (const number of Array(6).keys()) void resolve(`dead${number}.example`, KEY);
  for (const _time of ['first', 'while it is asked about']) void resolve('live.example', KEY);
  await nextTurn();
  beSilent('live.example');
  await nextTurn();
  void resolve('live.example', KEY);
  t.strictSame(questions, ['live.example', 'live.example']);
  answerByDns('live.example');
  await nextTurn();
  t.equal(asked.at(-1), 'live.example');
});

t.test('DNS that cannot be asked counts as silent', async (t) => {
  const { resolve, asked, answer, failToAskDns } = newResolver();
  const names = Array.from({ length: 8 }, (_, number) => `hosts${number}.example`);
  const looks = names.map((name) => resolve(name, KEY));
  await nextTurn();
  failToAskDns('hosts6.example');
  failToAskDns('hosts7.example');
  await nextTurn();
  t.equal(asked.length, 6);
  for (const [index, name] of names.entries()) {
    answer(name);
    t.strictSame(await looks[index], ANSWER, name);
  }
});

t.test('DNS is asked no longer than somebody waits', async (t) => {
  const { resolve, effects, answer, questions, asksDns } = newResolver();
  for (const number of Array(7).keys()) void resolve(`dead${number}.example`, KEY).catch(() => {});
  await nextTurn();
  t.ok(asksDns('dead6.example'));
  t.notOk(questions.includes('dead0.example'), 'nor if the name is looked up at once');
  effects.advance(PATIENCE_MS);
  t.notOk(asksDns('dead6.example'));
  const next = resolve('next.example', KEY);
  await nextTurn();
  t.ok(asksDns('next.example'));
  for (const number of Array(6).keys()) answer(`dead${number}.example`);
  await nextTurn();
  t.notOk(asksDns('next.example'), 'nor once it is looked up');
  answer('next.example');
  t.strictSame(await next, ANSWER);
});

t.test('a name that resolves late counts as new until it resolves in time', async (t) => {
  const { resolve, asked, answer, effects } = newResolver();
  const names = Array.from({ length: 7 }, (_, number) => `slow${number}.example`);
  for (const name of names) {
    const look = resolve(name, KEY);
    await nextTurn();
    effects.advance(2_000);
    answer(name);
    await look;
  }
  asked.length = 0;
  const looks = Promise.all(names.map((name) => resolve(name, KEY)));
  await nextTurn();
  t.equal(asked.length, 6);
  for (const name of names) {
    answer(name);
    await nextTurn();
  }
  await looks;
  asked.length = 0;
  const again = Promise.all(names.map((name) => resolve(name, KEY)));
  await nextTurn();
  t.equal(asked.length, 7);
  for (const name of names) answer(name);
  await again;
});

t.test('a name that nobody waits for any more is not looked up', async (t) => {
  const { resolve, asked, answer, effects } = newResolver();
  const dead = Array.from({ length: 6 }, (_, number) => `dead${number}.example`);
  const first = Promise.all(dead.map((name) => resolve(name, KEY)));
  const left = resolve('left.example', KEY);
  const wanted = resolve('wanted.example', KEY);
  await nextTurn();
  effects.advance(PATIENCE_MS);
  void resolve('wanted.example', KEY);
  effects.advance(1);
  for (const name of dead) answer(name);
  await first;
  await t.rejects(left, { message: 'its callers have given up' });
  t.strictSame(asked.slice(6), ['wanted.example']);
  answer('wanted.example');
  t.strictSame(await wanted, ANSWER);
});

t.test('a known name that resolves late counts as new from then on', async (t) => {
  const { resolve, asked, answer, effects } = newResolver();
  for (const lateMs of [0, 2_000]) {
    const look = resolve('known.example', KEY);
    await nextTurn();
    effects.advance(lateMs);
    answer('known.example');
    await look;
    await nextTurn(); // the late one has what the name stood for before its own answer is looked at
  }
  for (const number of Array(6).keys()) void resolve(`dead${number}.example`, KEY);
  void resolve('known.example', KEY);
  await nextTurn();
  t.equal(asked.length, 2 + 6);
  t.not(asked.at(-1), 'known.example');
});

t.test('the last answer for a name is used while no server answers', async (t) => {
  const { resolve, know, asked, effects } = newResolver();
  await know('one.example');
  const silent = resolve('one.example', KEY);
  const fresh = resolve('two.example', KEY);
  effects.advance(1_799);
  t.equal(await Promise.race([silent, nextTurn('none yet')]), 'none yet');
  effects.advance(1);
  t.strictSame(await silent, ANSWER);
  t.equal(await Promise.race([fresh, nextTurn('none')]), 'none', 'of another nothing is known');
  const again = resolve('one.example', KEY);
  t.equal(asked.length, 3, 'the look that is under way is shared');
  effects.advance(1_800);
  t.strictSame(await again, ANSWER);
  effects.advance(60 * 60_000);
  const late = resolve('one.example', KEY);
  effects.advance(1_800);
  t.equal(await Promise.race([late, nextTurn('none')]), 'none', 'but not for ever');
});

t.test('whoever joins a late look gets the last answer at once', async (t) => {
  const { resolve, know, effects } = newResolver();
  await know('one.example');
  const silent = resolve('one.example', KEY);
  await nextTurn();
  effects.advance(9_000);
  await silent;
  const joined = resolve('one.example', KEY);
  effects.advance(0);
  t.strictSame(await joined, ANSWER);
});

t.test('the last answer for a name is used if servers fail, but not if they know no such name', async (t) => {
  const { resolve, know, fail, effects } = newResolver();
  await know('one.example');
  for (const { code, afterMs, expected } of [
    { code: 'EAI_AGAIN', afterMs: 60 * 60_000, expected: ANSWER },
    { code: 'ENOTFOUND', afterMs: 0, expected: 'ENOTFOUND' },
    { code: 'EAI_AGAIN', afterMs: 1, expected: 'EAI_AGAIN' },
  ]) {
    effects.advance(afterMs);
    const look = resolve('one.example', KEY).catch((error) => error.code);
    await nextTurn();
    fail('one.example', code);
    t.strictSame(await look, expected);
  }
});

t.test('of a name with thousands of addresses the first 32 are used', async (t) => {
  const { resolve, answer } = newResolver();
  const look = resolve('many.example', KEY);
  await nextTurn();
  answer(
    'many.example',
    Array.from({ length: 4_000 }, () => ({ address: '93.184.216.34', family: 4 })),
  );
  t.equal((await look).length, 32);
});

t.test('a lookup asks for all addresses of a name', async (t) => {
  const resolve = createResolver({ timeoutMs: PATIENCE_MS }, fakeEffects());
  const addresses = await resolve('localhost', KEY);
  t.ok(addresses.length > 0);
  for (const { address } of addresses) t.match(address, /^(127\.|::1$)/);
});

for (const kind of ['silent', 'failing']) {
  t.test(
    `beside a hundred names for which DNS is ${kind}, others get what the system says`,
    ifMayServeDns,
    async (t) => {
      const { stdout, stderr } = runWithOwnDns(
        temporaryDirectory(t),
        '192.0.2.7 in-hosts.example\n',
        process.execPath,
        join(import.meta.dirname, '../fixtures/looks-up.ts'),
        ...[kind, 'in-hosts.example', 'nowhere.example'],
      );
      const expected = [[{ address: '192.0.2.7', family: 4 }], 'ENOTFOUND'];
      t.match(JSON.parse(stdout || 'null'), expected, stderr);
    },
  );
}

/** A resolver on a system and a DNS that answer when a test says so. */
function newResolver({ lookupsMax = undefined as number | undefined } = {}) {
  const effects = fakeEffects();
  const asked: string[] = [];
  const waiting = new Map<string, PromiseWithResolvers<LookupAddress[]>>();
  const questions: string[] = [];
  const askedDns = new Map<string, PromiseWithResolvers<boolean> & { signal: AbortSignal }>();
  const resolve = createResolver(
    {
      timeoutMs: PATIENCE_MS,
      lookupsMax,
      lookUp(hostname) {
        asked.push(hostname);
        const look = Promise.withResolvers<LookupAddress[]>();
        waiting.set(hostname, look);
        return look.promise;
      },
      askDns(hostname, signal) {
        questions.push(hostname);
        const question = Promise.withResolvers<boolean>();
        signal.addEventListener('abort', () => question.resolve(false));
        askedDns.set(hostname, { ...question, signal });
        return question.promise;
      },
    },
    effects,
  );
  return {
    effects,
    resolve,
    know,
    asked,
    questions,
    answer,
    fail: (hostname: string, code = 'EAI_AGAIN') =>
      waiting.get(hostname)?.reject(Object.assign(new Error(code), { code })),
    answerByDns: (hostname: string) => askedDns.get(hostname)?.resolve(true),
    beSilent: (hostname: string) => askedDns.get(hostname)?.resolve(false),
    failToAskDns: (hostname: string) => askedDns.get(hostname)?.reject(new Error('no resolver')),
    asksDns: (hostname: string) => askedDns.get(hostname)?.signal.aborted === false,
  };

  /** A first look at the name, answered at once. */
  async function know(hostname: string): Promise<void> {
    const look = resolve(hostname, KEY);
    await nextTurn();
    answer(hostname);
    await look;
  }

  function answer(hostname: string, addresses = ANSWER): void {
    waiting.get(hostname)?.resolve(addresses);
  }
}
