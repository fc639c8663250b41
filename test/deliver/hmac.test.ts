import { createHmac } from 'node:crypto';
import fc from 'fast-check';
import t from 'tap';
import { hmacKey, hmacSha256 } from '../../src/deliver/hmac.ts';

t.test('digests match RFC 4231', (t) => {
  for (const { key, text, digest } of [
    {
      key: Buffer.alloc(20, 0x0b),
      text: 'Hi There',
      digest: 'b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7',
    },
    {
      key: Buffer.from('Jefe'),
      text: 'what do ya want for nothing?',
      digest: '5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843',
    },
    {
      key: Buffer.alloc(131, 0xaa),
      text: 'Test Using Larger Than Block-Size Key - Hash Key First',
      digest: '60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54',
    },
  ]) {
    t.equal(hmacSha256(hmacKey(key), '', text, 'hex'), digest);
  }
  t.end();
});

t.test('digests match those of Hmac in Node for any key and message', (t) => {
  const bytes = fc.uint8Array({ maxLength: 200, size: 'max' });
  const text = fc.string({ unit: 'binary', maxLength: 9_000, size: 'max' });
  fc.assert(
    fc.property(bytes, fc.string({ unit: 'binary' }), fc.oneof(text, bytes), (key, prefix, body) => {
      const expected = createHmac('sha256', key).update(prefix).update(body);
      return hmacSha256(hmacKey(key), prefix, body, 'base64') === expected.digest('base64');
    }),
    { numRuns: 1_000 },
  );
  t.end();
});

t.test('a key can be reused, and lone surrogates are encoded as by Node', (t) => {
  const key = hmacKey(Buffer.from('secret'));
  for (const body of ['one', '\ud83d', 'x'.repeat(100_000), Buffer.alloc(50_000, 0xff), 'one']) {
    const expected = createHmac('sha256', 'secret').update('1.').update(body).digest('hex');
    t.equal(hmacSha256(key, '1.', body, 'hex'), expected);
  }
  t.end();
});
