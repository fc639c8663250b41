import assert from 'node:assert/strict';
import fc from 'fast-check';
import t from 'tap';
import { hiderOf, maskFor } from '../../src/deploy/mask.ts';
import { processorMs } from '../helpers/processor.ts';

t.test('a secret is masked however the output was split', async (t) => {
  const mask = maskFor(['hunter2hunter2']);
  const pieces = ['the password is hunt', 'er2hun', 'ter2, and hunter2 is ', 'not, hunter'].map((text) =>
    mask.push(Buffer.from(text)).toString(),
  );
  t.strictSame(pieces, ['the password is ', '', '***, and hunter2 is ', 'not, ']);
  t.equal(mask.end().toString(), 'hunter');
});

t.test('only a possible beginning of a secret is held back', async (t) => {
  const mask = maskFor(['secret-value']);
  t.equal(mask.push(Buffer.from('a line\n')).toString(), 'a line\n');
  t.equal(mask.push(Buffer.from('a line secret-va')).toString(), 'a line ');
  t.equal(mask.push(Buffer.from('se, no\n')).toString(), 'secret-vase, no\n');
  t.equal(mask.push(Buffer.from('a secret-value')).toString(), 'a ***', 'a whole one is none');
});

t.test('values of less than 8 characters are not masked', async (t) => {
  t.equal(
    hidden('the region is eu-west, true', ['eu-west', 'true', '', 'is']),
    'the region is eu-west, true',
  );
});

t.test('of secrets with a common prefix the longest is masked', async (t) => {
  t.equal(hidden('12345678 123456789 1234567', ['12345678', '123456789']), '*** *** 1234567');
  const brothers = ['12345678', '123456781', '1234567822', '123456783'];
  t.equal(
    hidden('123456782 123456784 1234567822', brothers),
    '***2 ***4 ***',
    'or the one that stands there',
  );
  t.equal(
    hidden('abcdefgh123456789', ['abcdefgh', '12345678', '123456789']),
    '******',
    'right behind another',
  );
});

t.test('overlapping secrets are masked entirely, however the output was split', async (t) => {
  const secrets = ['user:pass-word', 'pass-word@host.example', 'example/database'];
  const text = 'at user:pass-word@host.example/database, pass-word@host.example and user:pass-wor';
  t.equal(hidden(text, secrets), 'at ***, *** and user:pass-wor');
  for (let at = 0; at < text.length; at++) {
    const mask = maskFor(secrets);
    const pieces = [text.slice(0, at), text.slice(at)].map((piece) => mask.push(Buffer.from(piece)));
    t.equal(Buffer.concat([...pieces, mask.end()]).toString(), 'at ***, *** and user:pass-wor');
  }
});

t.test('a secret of several lines is masked as a whole and line by line', async (t) => {
  const secret = '-----BEGIN KEY-----\nMIIEpAIBAAKC\nshort\n-----END KEY-----\n';
  t.equal(hidden(`key: ${secret}!`, [secret]), 'key: ***\n!', 'but for the line end behind it');
  t.equal(hidden('2: MIIEpAIBAAKC\n3: short\n', [secret]), '2: ***\n3: short\n');
});

t.test('multi-line secrets are masked with any line ends', async (t) => {
  for (const end of ['\n', '\r\n']) {
    const secret = ['one', 'two', 'first-line', 'second-line'].join(end);
    t.equal(hidden(`<${secret}>`, [`${end}${end}${secret}${end}${end}`]), '<***>');
    t.equal(hidden('<first-line\nsecond-line\r\n>', [secret]), '<***\n***\r\n>');
  }
});

t.test('each text is masked on its own', async (t) => {
  const hide = hiderOf(['secret-value', '12345678']);
  const texts = ['a secret-', 'value of it', '12345678', '1234567'];
  t.strictSame(texts.map(hide), ['a secret-', 'value of it', '***', '1234567']);
});

t.test('a secret with tens of thousands of empty lines is masked', async (t) => {
  const secret = `${'\n'.repeat(50_000)}first-line${'\n'.repeat(50_000)}second-line`;
  t.equal(hidden(`<${secret}\n>`, [`${secret}\n`]), `<${'\n'.repeat(50_000)}***\n>`);
});

t.test('invalid UTF-8 passes unchanged', async (t) => {
  const mask = maskFor(['pässwörd']);
  const bytes = Buffer.concat([Buffer.from([0xff, 0]), Buffer.from('pässwörd'), Buffer.from([0xc3])]);
  t.strictSame(
    Buffer.concat([mask.push(bytes), mask.end()]),
    Buffer.concat([Buffer.from([0xff, 0]), Buffer.from('***'), Buffer.from([0xc3])]),
  );
});

t.test('masking does not depend on how the output was split', async (t) => {
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

t.test('masking finds what a naive search at every position finds', async (t) => {
  const letters = fc.constantFrom('ab', 'abc', 'ab\n').chain((alphabet) => {
    const string = (minLength: number, maxLength: number) =>
      fc.string({ unit: fc.constantFrom(...alphabet), minLength, maxLength });
    return fc.record({
      secrets: fc.array(string(6, 16), { minLength: 1, maxLength: 5 }),
      between: fc.array(string(0, 4), { maxLength: 8 }),
    });
  });
  const slice = fc.tuple(fc.nat(4), fc.nat(6), fc.integer({ min: 6, max: 16 }));
  const slices = fc.array(slice, { minLength: 8, maxLength: 8 });
  const lengths = fc.array(fc.nat(12), { maxLength: 20 });
  const property = fc.property(letters, slices, lengths, ({ secrets, between }, slices, lengths) => {
    const text = between
      .map((string, index) => {
        const [which, from, to] = slices[index] ?? [0, 0, 0];
        return string + (secrets[which] ?? '').slice(from, to);
      })
      .join('');
    const mask = maskFor(secrets);
    const shown: Buffer[] = [];
    let at = 0;
    for (const length of [...lengths, text.length]) {
      shown.push(mask.push(Buffer.from(text.slice(at, at + length))));
      at += length;
    }
    assert.equal(Buffer.concat([...shown, mask.end()]).toString(), plainlyMasked(text, linesToo(secrets)));
  });
  t.doesNotThrow(() => fc.assert(property, { numRuns: 5000 }));
});

t.test('the work grows with the text, not with how often a secret begins in it', (t) => {
  const varied = Array.from({ length: 10_000 }, (_, number) => `${number},`).join('');
  const usualMs = lookMs([varied], varied.repeat(10));
  const textBytes = varied.length * 10;
  for (const secret of ['A'.repeat(64), `${'A'.repeat(4000)}B`, `${'AB'.repeat(30_000)}C`]) {
    const text = secret.slice(0, 2).repeat(textBytes / 2);
    const ms = lookMs([secret], text);
    t.ok(ms < usualMs * 10, `${secret.length} letters: ${ms} ms, usually ${usualMs} ms`);
  }
  t.end();
});

t.test('the work grows with the text, not with the number of secrets', (t) => {
  const lines = Array.from({ length: 14_000 }, (_, number) => `line ${number} of a key`);
  const log = lines.map((line) => `> ${line}\n`).join('');
  t.equal(hidden(log, [lines.join('\n')]), '> ***\n'.repeat(lines.length));
  const oneMs = lookMs(['> line'.padEnd(24)], log);
  const allMs = lookMs([lines.join('\n')], log);
  t.ok(allMs < oneMs * 40, `${allMs} ms for all, ${oneMs} ms for one`);
  t.end();
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

/** What it takes to look through the text, in the pieces in which a pipe is read. */
function lookMs(secrets: string[], text: string): number {
  const bytes = Buffer.from(text);
  const mask = maskFor(secrets);
  return processorMs(() => {
    for (let at = 0; at < bytes.length; at += 64 * 1024) mask.push(bytes.subarray(at, at + 64 * 1024));
    mask.end();
  });
}

/** For texts without other line ends. */
function linesToo(secrets: string[]): string[] {
  return secrets.flatMap((secret) => [secret.replace(/^\n+|\n+$/g, ''), ...secret.split('\n')]);
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
