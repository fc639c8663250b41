import t from 'tap';
import { timestamp } from '../../src/domain.ts';
import { HOUR_MS } from '../../src/durations.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { testStore } from '../helpers/store.ts';

t.test('without an overlap the old secret ends at once', async (t) => {
  const { store, holder } = setup(t);
  const { keyId, secret } = await store.key();
  const rotated = await store.writer.write('keys.rotate', { id: keyId, overlapMs: 0 });
  t.match(rotated.key, { id: keyId, last4: rotated.secret.slice(-4) });
  t.equal(holder(secret), undefined);
  t.equal(holder(rotated.secret), keyId);
  t.equal(store.query('SELECT 1 FROM key_secrets').length, 1, 'the row of the old secret is removed');
});

t.test('a key knows when it was given its present secret, unless it has still its first', async (t) => {
  const { store, effects } = setup(t);
  const { keyId } = await store.key();
  t.equal(store.reads.keys.get(keyId)?.rotated_at, null);
  for (const overlapMs of [HOUR_MS, 0]) {
    effects.advance(HOUR_MS);
    const { key } = await store.writer.write('keys.rotate', { id: keyId, overlapMs });
    t.equal(key.rotated_at, timestamp(effects.now()));
  }
});

t.test('with an overlap both secrets work until it is over', async (t) => {
  const { store, effects, holder } = setup(t);
  const { keyId, secret } = await store.key();
  const rotated = await store.writer.write('keys.rotate', { id: keyId, overlapMs: HOUR_MS });
  t.strictSame(store.reads.keys.outgoingSecrets(keyId, effects.now()), [
    { last4: secret.slice(-4), expires_at: new Date(effects.now() + HOUR_MS).toISOString() },
  ]);
  effects.advance(HOUR_MS - 1);
  t.strictSame([holder(secret), holder(rotated.secret)], [keyId, keyId]);
  effects.advance(1);
  t.strictSame([holder(secret), holder(rotated.secret)], [undefined, keyId]);
  t.strictSame(store.reads.keys.outgoingSecrets(keyId, effects.now()), []);
});

t.test('another rotation never prolongs the overlap of an earlier secret', async (t) => {
  const { store, effects, holder } = setup(t);
  const { keyId, secret: first } = await store.key();
  const { secret: second } = await store.writer.write('keys.rotate', { id: keyId, overlapMs: 10 * HOUR_MS });
  const { secret: third } = await store.writer.write('keys.rotate', { id: keyId, overlapMs: 20 * HOUR_MS });
  effects.advance(10 * HOUR_MS);
  t.strictSame(
    [first, second, third].map(holder),
    [undefined, keyId, keyId],
    'an overlap is never made longer',
  );
  await store.writer.write('keys.rotate', { id: keyId, overlapMs: 0 });
  t.strictSame(
    [first, second, third].map(holder),
    [undefined, undefined, undefined],
    'a leak can be ended at once',
  );
});

t.test('a secret expires with its key, however long its overlap is', async (t) => {
  const { store, effects, holder } = setup(t);
  const { keyId, secret: first } = await store.key({ expiresInMs: 2 * HOUR_MS });
  const { secret: second } = await store.writer.write('keys.rotate', { id: keyId, overlapMs: HOUR_MS });
  effects.advance(HOUR_MS);
  t.strictSame([first, second].map(holder), [undefined, keyId], 'earlier, if its overlap is over');
  const { secret: third } = await store.writer.write('keys.rotate', { id: keyId, overlapMs: 9 * HOUR_MS });
  const outgoing = () => store.reads.keys.outgoingSecrets(keyId, effects.now());
  t.strictSame(outgoing(), [
    { last4: second.slice(-4), expires_at: new Date(effects.now() + HOUR_MS).toISOString() },
  ]);
  effects.advance(HOUR_MS - 1);
  t.strictSame([second, third].map(holder), [keyId, keyId]);
  effects.advance(1);
  t.strictSame([second, third].map(holder), [undefined, undefined]);
  t.strictSame(outgoing(), []);
});

t.test(
  'a key shows its newest secret, and those that still work beside it, the first to end first',
  async (t) => {
    const { store, effects } = setup(t);
    const { keyId, secret } = await store.key();
    const last4s = [secret.slice(-4)];
    for (let count = 0; count < 4; count++) {
      effects.advance(1);
      const { secret } = await store.writer.write('keys.rotate', { id: keyId, overlapMs: HOUR_MS });
      last4s.push(secret.slice(-4));
    }
    const outgoing = store.reads.keys.outgoingSecrets(keyId, effects.now()).map(({ last4 }) => last4);
    t.strictSame([...outgoing, store.reads.keys.get(keyId)?.last4], last4s);
  },
);

t.test('a rotation changes nothing for other keys', async (t) => {
  const { store, holder } = setup(t);
  const [rotated, other] = [await store.key(), await store.key()];
  const { secret } = await store.writer.write('keys.rotate', { id: other.keyId, overlapMs: HOUR_MS });
  await store.writer.write('keys.rotate', { id: rotated.keyId, overlapMs: 0 });
  t.strictSame([other.secret, secret].map(holder), [other.keyId, other.keyId]);
});

t.test('a key that is unknown, revoked or expired is not rotated', async (t) => {
  const { store, effects } = setup(t);
  const revoked = await store.key();
  await store.writer.write('keys.revoke', { id: revoked.keyId });
  const expired = await store.key({ expiresInMs: 1 });
  effects.advance(1);
  const before = store.dump();
  const rotate = (id: string) => store.writer.write('keys.rotate', { id, overlapMs: 0 });
  await t.rejects(rotate(revoked.keyId), { code: 'conflict' });
  await t.rejects(rotate(expired.keyId), { code: 'conflict' });
  await t.rejects(rotate('key_none'), { code: 'not_found' });
  t.strictSame(store.dump(), before);
});

t.test('a name finds the only key that has it, or else the only one that lives', async (t) => {
  const { store, effects } = setup(t);
  const resolve = (idOrName: string) => store.reads.keys.resolve(idOrName, effects.now()).id;
  const first = await store.key({ name: 'ci' });
  t.equal(resolve('ci'), first.keyId);
  await store.writer.write('keys.revoke', { id: first.keyId });
  t.equal(resolve('ci'), first.keyId);
  const second = await store.key({ name: 'ci' });
  t.equal(resolve('ci'), second.keyId);
  t.equal(resolve(first.keyId), first.keyId);
  const third = await store.key({ name: 'ci' });
  t.throws(() => resolve('ci'), { code: 'conflict' });
  await store.writer.write('keys.revoke', { id: third.keyId });
  t.equal(resolve('ci'), second.keyId);
  await store.writer.write('keys.revoke', { id: second.keyId });
  t.throws(() => resolve('ci'), { code: 'conflict' });
  t.throws(() => resolve('nobody'), { code: 'not_found' });

  const [expired, fourth] = [
    await store.key({ name: 'ci', expiresInMs: 1 }),
    await store.key({ name: 'ci', expiresInMs: 2 }),
  ];
  t.throws(() => resolve('ci'), { code: 'conflict' });
  effects.advance(1);
  t.equal(resolve('ci'), fourth.keyId);
  await store.writer.write('keys.revoke', { id: fourth.keyId });
  t.equal(resolve('ci'), expired.keyId, 'rather than a revoked one');
  await store.key({ name: 'ci', expiresInMs: 0 });
  t.throws(() => resolve('ci'), { code: 'conflict' });
});

function setup(t: Parameters<typeof testStore>[0]) {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const holder = (secret: string) => store.reads.keys.authenticate(secret, effects.now())?.keyId;
  return { effects, store, holder };
}
