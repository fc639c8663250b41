import t from 'tap';
import {
  hashKeySecret,
  isKeySecret,
  isSigningSecret,
  newKeySecret,
  newSigningSecret,
  withoutSecrets,
} from '../src/secrets.ts';

/** Computed by other programs: the keys that people have must be valid with every later davit, too. */
const KNOWN = {
  secret: 'davit_0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefg3cg5vq',
  hash: '7b329c04266b667d91764b2439e39f604f9c379981a041e23e21ab0e9df3f23a',
};

t.test(
  'a key is 43 random characters between its prefix and its checksum, kept as its SHA-256',
  async (t) => {
    t.equal(newKeySecret(counting), KNOWN.secret);
    t.ok(isKeySecret(KNOWN.secret));
    t.equal(hashKeySecret(KNOWN.secret), KNOWN.hash);
  },
);

t.test('a checksum tells a mistyped key from a real one', async (t) => {
  const { secret } = KNOWN;
  for (const text of [
    '',
    secret.replace('davit_0', 'davit_1'),
    secret.replace('davit_01', 'davit_10'),
    secret.slice(0, -1),
    `${secret}a`,
    `x${secret}`,
    `${secret}\n`,
    secret.toLowerCase(),
  ]) {
    t.notOk(isKeySecret(text), text);
  }
});

t.test('a signing secret is 32 random bytes, as Standard Webhooks writes them', async (t) => {
  const secret = 'whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=';
  t.equal(newSigningSecret(counting), secret);
  t.ok(isSigningSecret(secret));
  t.ok(isSigningSecret(newSigningSecret((size) => new Uint8Array(size).fill(0xfb))), 'also with + and /');
  for (const text of [
    '',
    `"${secret}"`,
    `x${secret}`,
    `${secret}\n`,
    secret.slice(6),
    secret.slice(0, -1),
    KNOWN.secret,
  ])
    t.notOk(isSigningSecret(text), text);
});

t.test('secrets are taken out of a text wherever they stand, and nothing else', async (t) => {
  const { secret } = KNOWN;
  const signing = newSigningSecret((size) => new Uint8Array(size).fill(0xfb));
  t.equal(withoutSecrets(`${secret}: x${secret},${signing}!`), 'davit_…: xdavit_…,whsec_…!');
  t.equal(withoutSecrets(signing.replace('=', '')), 'whsec_…', 'also one that is cut off');
  t.equal(
    withoutSecrets('http://me:p%20w@a.example, https://token@b.example/x, http://me:p@ss@c.example'),
    'http://…@a.example, https://…@b.example/x, http://…@c.example',
  );
  for (const text of [
    'davit_deployments_total',
    'whsec_',
    'https://a.example/@x',
    'https://a.example x@y',
    '://@',
  ]) {
    t.equal(withoutSecrets(text), text);
  }
});

/** 0, 1, 2 and so on. */
function counting(size: number): Uint8Array {
  return Uint8Array.from({ length: size }, (_, index) => index);
}
