import assert from 'node:assert/strict';
import fc from 'fast-check';
import t from 'tap';
import { hiderOf, maskFor } from '../../src/deploy/mask.ts';

t.test('a secret is hidden, however the output was cut', async (t) => {
  const mask = maskFor(['hunter2hunter2']);
  const pieces = ['the password is hunt', 'er2hun', 'ter2, and hunter2 is ', 'not, hunter'].map((text) =>
    mask.push(Buffer.from(text)).toString(),
  );
  t.strictSame(pieces, ['the password is ', '', '***, and hunter2 is ', 'not, ']);
  t.equal(mask.end().toString(), 'hunter');
});

t.test('only what may be the beginning of a secret is kept back', async (t) => {
  const mask = maskFor(['secret-value']);
  t.equal(mask.push(Buffer.from('a line\n')).toString(), 'a line\n');
  t.equal(mask.push(Buffer.from('a line secret-va')).toString(), 'a line ');
  t.equal(mask.push(Buffer.from('se, no\n')).toString(), 'secret-vase, no\n');
});

t.test('values of less than 8 characters are not hidden', async (t) => {
  t.equal(
    hidden('the region is eu-west, true', ['eu-west', 'true', '', 'is']),
    'the region is eu-west, true',
  );
});

t.test('of secrets that begin alike the longest is hidden', async (t) => {
  t.equal(hidden('12345678 123456789 1234567', ['12345678', '123456789']), '*** *** 1234567');
  const brothers = ['12345678', '123456781', '1234567822', '123456783'];
  t.equal(
    hidden('123456782 123456784 1234567822', brothers),
    '***2 ***4 ***',
    'or the one that stands there',
  );
});

t.test('of secrets that overlap nothing is left to be read, however the output was cut', async (t) => {
  const secrets = ['user:pass-word', 'pass-word@host.example', 'example/database'];
  const text = 'at user:pass-word@host.example/database, pass-word@host.example and user:pass-wor';
  t.equal(hidden(text, secrets), 'at ***, *** and user:pass-wor');
  for (let at = 0; at < text.length; at++) {
    const mask = maskFor(secrets);
    const pieces = [text.slice(0, at), text.slice(at)].map((piece) => mask.push(Buffer.from(piece)));
    t.equal(Buffer.concat([...pieces, mask.end()]).toString(), 'at ***, *** and user:pass-wor');
  }
});

t.test('a secret of several lines is hidden as a whole and line by line', async (t) => {
  const secret = '-----BEGIN KEY-----\nMIIEpAIBAAKC\nshort\n-----END KEY-----\n';
  t.equal(hidden(`key: ${secret}!`, [secret]), 'key: ***\n!', 'but for the line end behind it');
  t.equal(hidden('2: MIIEpAIBAAKC\n3: short\n', [secret]), '2: ***\n3: short\n');
});

t.test('whichever way lines end, in a secret, around it and where they are printed', async (t) => {
  for (const end of ['\n', '\r\n']) {
    const secret = ['one', 'two', 'first-line', 'second-line'].join(end);
    t.equal(hidden(`<${secret}>`, [`${end}${end}${secret}${end}${end}`]), '<***>');
    t.equal(hidden('<first-line\nsecond-line\r\n>', [secret]), '<***\n***\r\n>');
  }
});

t.test('bytes that are no UTF-8 pass', async (t) => {
  const mask = maskFor(['pässwörd']);
  const bytes = Buffer.concat([Buffer.from([0xff, 0]), Buffer.from('pässwörd'), Buffer.from([0xc3])]);
  t.strictSame(
    Buffer.concat([mask.push(bytes), mask.end()]),
    Buffer.concat([Buffer.from([0xff, 0]), Buffer.from('***'), Buffer.from([0xc3])]),
  );
});

t.test('what is hidden does not depend on how the output was cut', async (t) => {
  // Few letters and much repetition, so that secrets overlap, begin alike and begin again inside themselves.
  const text = fc.constantFrom('a', 'b', 'ab', 'aab', 'abababab', 'aabaabaab');
  const secret = fc
    .tuple(fc.constantFrom('abababababab', 'babababababa', 'aabaabaabaab'), fc.integer({ min: 7, max: 12 }))
    .map(([whole, length]) => whole.slice(0, length));
  const property = fc.property(
    fc.array(text, { maxLength: 20 }),
    fc.array(secret, { maxLength: 4 }),
    (pieces, secrets) => {
      const mask = maskFor(secrets);
      const cut = [...pieces.map((piece) => mask.push(Buffer.from(piece))), mask.end()];
      assert.equal(Buffer.concat(cut).toString(), plainlyMasked(pieces.join(''), secrets));
    },
  );
  t.doesNotThrow(() => fc.assert(property, { numRuns: 2000 }));
});

t.test('many secrets are looked for at once: what is done grows with the text, not with both', async (t) => {
  const lines = Array.from({ length: 14_000 }, (_, number) => `line ${number} of a key`);
  const log = lines.map((line) => `> ${line}\n`).join('');
  const compare = Buffer.prototype.compare;
  let comparisons = 0;
  t.teardown(() => {
    Buffer.prototype.compare = compare;
  });
  const mask = maskFor([lines.join('\n')]);
  Buffer.prototype.compare = function (this: Buffer, ...words: Parameters<typeof compare>) {
    comparisons += 1;
    return compare.apply(this, words);
  };
  const text = Buffer.concat([mask.push(Buffer.from(log)), mask.end()]).toString();
  t.equal(text, '> ***\n'.repeat(lines.length));
  t.ok(comparisons < lines.length * 40, `${comparisons} comparisons`);
});

t.test('a secret may have as many lines as variables have room for', (t) => {
  const lines = Array.from({ length: 150_000 }, (_, index) => String(index).padStart(8, '0'));
  const hide = hiderOf([lines.join('\n')]);
  t.equal(hide('the last is 00149999, and 00150000 is none'), 'the last is ***, and 00150000 is none');
  t.end();
});

function hidden(text: string, secrets: string[]): string {
  return hiderOf(secrets)(text);
}

/** Character by character. */
function plainlyMasked(text: string, secrets: string[]): string {
  const hidden = secrets.filter(({ length }) => length >= 8);
  let masked = '';
  let hiddenUntil = 0;
  for (let at = 0; at < text.length; at++) {
    const ends = hidden.filter((secret) => text.startsWith(secret, at)).map(({ length }) => at + length);
    if (ends.length > 0 && at >= hiddenUntil) masked += '***';
    hiddenUntil = Math.max(hiddenUntil, ...ends);
    if (at >= hiddenUntil) masked += text[at];
  }
  return masked;
}
