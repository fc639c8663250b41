import t from 'tap';
import { hashKeySecret, isKeySecret } from '../../src/secrets.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { testStore } from '../helpers/store.ts';

t.test('a secret authenticates its key and is not in the file', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId, secret } = await store.key({ name: 'ci', scopes: ['projects:read'] });
  t.ok(isKeySecret(secret));
  t.match(store.reads.keys.authenticate(hashKeySecret(secret), effects.now()), {
    keyId,
    name: 'ci',
    scopes: ['projects:read'],
    allProjects: true,
  });
  t.notOk(JSON.stringify(store.dump()).includes(secret));
  t.equal(store.reads.keys.get(keyId)?.last4, secret.slice(-4));
});

t.test('a wrong, expired or revoked secret authenticates nobody', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const expiring = await store.key({ expiresAtMs: effects.now() + 1000 });
  const revoked = await store.key();
  const holder = (secret: string) => store.reads.keys.authenticate(hashKeySecret(secret), effects.now());

  t.ok(holder(expiring.secret));
  effects.advance(1000);
  t.equal(holder(expiring.secret), undefined);

  t.ok(holder(revoked.secret));
  await store.writer.write('keys.revoke', { id: revoked.keyId });
  t.equal(holder(revoked.secret), undefined);
  t.equal(holder('davit_nonsense'), undefined);
});

t.test('a key for a project that is not there is refused whole', async (t) => {
  const store = testStore(t);
  const before = store.dump();
  await t.rejects(store.key({ allProjects: false, projectIds: ['prj_none' as never] }), {
    code: 'not_found',
  });
  t.strictSame(store.dump(), before);
});

t.test('a checksum tells a mistyped key from a real one', (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  return store.key().then(({ secret }) => {
    t.notOk(isKeySecret(`${secret.slice(0, 10)}${secret[10] === 'a' ? 'b' : 'a'}${secret.slice(11)}`));
    t.notOk(isKeySecret(secret.slice(0, -1)));
    t.notOk(isKeySecret(`${secret}a`));
    t.notOk(isKeySecret(''));
  });
});
