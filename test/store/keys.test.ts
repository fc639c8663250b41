import t from 'tap';
import { EVENT_TYPES } from '../../src/domain.ts';
import { isKeySecret } from '../../src/secrets.ts';
import { keyReads } from '../../src/store/keys.ts';
import type { AnswerRequest } from '../../src/store/operations.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, testStore } from '../helpers/store.ts';

t.test('a secret authenticates its key and is not in the file', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { keyId, secret } = await store.key({ scopes: ['projects:read'] });
  t.ok(isKeySecret(secret));
  t.match(store.reads.keys.authenticate(secret, effects.now()), {
    keyId,
    scopes: ['projects:read'],
    allProjects: true,
  });
  t.notOk(JSON.stringify(store.dump()).includes(secret));
  t.equal(store.reads.keys.get(keyId)?.last4, secret.slice(-4));
});

t.test('a wrong, expired or revoked secret authenticates nobody', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const expiring = await store.key({ expiresInMs: 1000 });
  const revoked = await store.key();
  const other = await store.key();
  const holder = (secret: string) => store.reads.keys.authenticate(secret, effects.now());

  t.ok(holder(expiring.secret));
  effects.advance(1000);
  t.equal(holder(expiring.secret), undefined);

  t.ok(holder(revoked.secret));
  await store.writer.write('keys.revoke', { id: revoked.keyId });
  t.equal(holder(revoked.secret), undefined);
  t.match(holder(other.secret), { keyId: other.keyId });
  t.equal(holder('davit_nonsense'), undefined);
});

t.test('the file is not asked for what no key can be, however often a stranger tries', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { secret } = await store.key();
  const reader = store.openReader();
  const keys = keyReads(reader);
  reader.close();
  const mistyped = `${secret.slice(0, -1)}${secret.endsWith('0') ? '1' : '0'}`;
  for (const text of ['', 'davit_nonsense', mistyped])
    t.equal(keys.authenticate(text, effects.now()), undefined);
  t.throws(() => keys.authenticate(secret, effects.now()), 'it would fail');
});

t.test('a write that was authenticated before its key was revoked is rejected afterwards', async (t) => {
  const store = testStore(t);
  const { keyId } = await store.key();
  const projectId = await store.project();
  const asks = { keyId, identity: null, statusCode: 201 };
  const webhook = {
    keyId,
    url: 'https://hooks.example.org/',
    events: EVENT_TYPES.slice(),
    description: null,
  };
  const revoked = store.writer.write('keys.revoke', { id: keyId });
  const late: AnswerRequest[] = [
    { ...asks, operation: 'webhooks.create', input: webhook, locationPrefix: '/v2/webhooks/' },
    {
      ...asks,
      operation: 'deployments.create',
      input: newDeployment(projectId, { keyId }),
      locationPrefix: '/v2/deployments/',
    },
  ];
  for (const request of late) {
    await t.rejects(store.writer.write('answer', request), { code: 'unauthorized' }, request.operation);
  }
  t.ok((await revoked).revoked_at);
  t.strictSame(store.query('SELECT id FROM webhooks UNION ALL SELECT id FROM deployments'), []);
});

t.test(
  'a key is revoked once, and stays in the list, which is in the order in which keys were made',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const keys = [await store.key(), await store.key(), await store.key()].map(({ keyId }) => keyId);
    const [, revoked = ''] = keys;
    await store.writer.write('keys.revoke', { id: revoked });
    const before = store.dump();
    effects.advance(1);
    await store.writer.write('keys.revoke', { id: revoked });
    t.strictSame(store.dump(), before);
    t.strictSame(
      store.reads.keys.list().map(({ id }) => id),
      keys,
    );
  },
);

t.test('a key that is given a project twice sees it once', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const { keyId } = await store.key({ allProjects: false, projectIds: [projectId, projectId] });
  t.strictSame(store.reads.keys.get(keyId)?.project_ids, [projectId]);
});

t.test('a key for an unknown project is not created', async (t) => {
  const store = testStore(t);
  const before = store.dump();
  await t.rejects(store.key({ allProjects: false, projectIds: ['prj_none' as never] }), {
    code: 'not_found',
  });
  t.strictSame(store.dump(), before);
});
