import { setImmediate as nextTurn } from 'node:timers/promises';
import t from 'tap';
import type { KeyId } from '../../src/domain.ts';
import { createPages } from '../../src/http/pages.ts';
import { projects } from '../../src/http/projects.ts';
import type { Writer } from '../../src/store/writer.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { requestJson, startHttp } from '../helpers/http.ts';
import { testStore } from '../helpers/store.ts';

t.test('the last use of a key is written once a minute, also after the clock was set ahead', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const notes: number[] = [];
  const write: Writer['write'] = (name, input) => {
    if (name === 'keys.touch') notes.push(effects.now());
    return store.writer.write(name, input);
  };
  const { port } = await startHttp(t, {
    effects,
    store: { ...store, writer: { ...store.writer, write } },
    resources: ({ reads }) => [projects(reads, createPages(reads.instance.cursorSecret(), effects))],
  });
  const { secret, keyId } = await store.key();
  /** Uses the key after each of these pauses; gives when a use was written, counted from now. */
  const notedAt = async (...afterMs: number[]): Promise<number[]> => {
    const startMs = effects.now();
    for (const ms of afterMs) {
      effects.jump(ms);
      t.equal((await requestJson(port, 'GET', '/v2/projects', { key: secret })).status, 200);
      await store.writer.write('instance.probe', undefined); // queued behind the write of the last use
    }
    return notes.splice(0).map((atMs) => atMs - startMs);
  };

  t.strictSame(await notedAt(0, 59_999, 1), [0, 60_000]);
  t.strictSame(await notedAt(3_600_000), [3_600_000], 'the clock is set ahead');
  t.strictSame(await notedAt(-3_600_000, 1, 1), [-3_600_000], 'the clock is set back');
  t.equal(store.reads.keys.get(keyId)?.last_used_at, '2026-11-21T08:01:00.000Z');
});

t.test('a key is read from Authorization: Bearer only; a 401 says if it is missing or wrong', async (t) => {
  const effects = fakeEffects();
  const { port, store } = await startHttp(t, {
    effects,
    resources: ({ reads }) => [projects(reads, createPages(reads.instance.cursorSecret(), effects))],
  });
  const { secret } = await store.key();
  const answerTo = async (authorization: string) => {
    const { status, body } = await requestJson(port, 'GET', '/v2/projects', { headers: { authorization } });
    return { status, says: JSON.stringify(body) };
  };

  for (const scheme of ['Bearer', 'bearer', 'BEARER', 'Bearer '])
    t.match(await answerTo(`${scheme} ${secret}`), { status: 200 }, scheme);
  const noKeys = ['', 'Bearer', `Bearer${secret}`, secret, `Basic ${secret}`, `Digest Bearer ${secret}`];
  for (const text of [...noKeys, `Bearer ${secret} x`, `Bearer ${secret},`, `Bearer x, Bearer ${secret}`])
    t.match(await answerTo(text), { status: 401, says: /send an API key/ }, text);
  for (const text of [`Bearer ${secret}0`, `Bearer ${secret.slice(0, -1)}`, `Bearer "${secret}"`])
    t.match(await answerTo(text), { status: 401, says: /wrong, expired or revoked/ }, text);
});

t.test('a key is answered 401 from the moment at which it expires', async (t) => {
  const effects = fakeEffects();
  const { port, store } = await startHttp(t, {
    effects,
    resources: ({ reads }) => [projects(reads, createPages(reads.instance.cursorSecret(), effects))],
  });
  const { secret: key } = await store.key({ expiresInMs: 60_000 });
  for (const [ms, status] of [
    [59_999, 200],
    [1, 401],
  ] as const) {
    effects.jump(ms);
    t.match(await requestJson(port, 'GET', '/v2/projects', { key }), { status });
  }
});

t.test(
  'while the use of a key cannot be written, one request in a minute tries, and the log says so',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    let refused = true;
    const tried: KeyId[] = [];
    const write: Writer['write'] = (name, input) => {
      if (name === 'keys.touch') tried.push((input as { keyId: KeyId }).keyId);
      return refused && name === 'keys.touch'
        ? Promise.reject(new Error('the disk is full'))
        : store.writer.write(name, input);
    };
    const { port, log } = await startHttp(t, {
      effects,
      store: { ...store, writer: { ...store.writer, write } },
      resources: ({ reads }) => [projects(reads, createPages(reads.instance.cursorSecret(), effects))],
    });
    const [one, other, third] = [await store.key(), await store.key(), await store.key()];
    const use = async ({ secret }: { secret: string }) =>
      t.equal((await requestJson(port, 'GET', '/v2/projects', { key: secret })).status, 200);
    const warnings = () => log.filter(({ msg }) => msg === 'the use of a key could not be recorded').length;

    for (const key of [one, one, other]) await use(key);
    t.strictSame([tried, warnings()], [[one.keyId, other.keyId], 1]);
    effects.advance(59_999);
    await use(one);
    t.strictSame([tried.length, warnings()], [2, 1]);
    refused = false;
    await use(third);
    t.equal(tried.length, 3, 'the others are not put off');
    refused = true;
    effects.advance(1);
    await use(one);
    t.strictSame([tried.length, warnings()], [4, 2]);
    refused = false;
    effects.advance(60_000);
    await use(one);
    await store.writer.write('instance.probe', undefined); // queued behind the write of the last use
    t.ok(store.reads.keys.get(one.keyId)?.last_used_at);
  },
);

t.test(
  'while the last use of a key is not written yet, further requests do not write it again',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const disk = Promise.withResolvers<void>();
    let notes = 0;
    const write: Writer['write'] = async (name, input) => {
      if (name === 'keys.touch') {
        notes += 1;
        await disk.promise;
      }
      return store.writer.write(name, input);
    };
    const { port } = await startHttp(t, {
      effects,
      store: { ...store, writer: { ...store.writer, write } },
      resources: ({ reads }) => [projects(reads, createPages(reads.instance.cursorSecret(), effects))],
    });
    const [one, other] = [await store.key(), await store.key()];
    const use = async ({ secret }: { secret: string }) =>
      t.equal((await requestJson(port, 'GET', '/v2/projects', { key: secret })).status, 200);

    for (const key of [one, one, other, one]) await use(key);
    t.equal(notes, 2);
    disk.resolve();
    await nextTurn();
    await store.writer.write('instance.probe', undefined);
    for (const { keyId } of [one, other]) t.ok(store.reads.keys.get(keyId)?.last_used_at);
    effects.jump(60_000);
    await use(one);
    t.equal(notes, 3);
  },
);
