import fc from 'fast-check';
import t from 'tap';
import { parseJson } from '../../src/http/json.ts';

t.test('parseJson reads what JSON.stringify writes as JSON.parse does', async (t) => {
  const reachingForNothing = '{"constructor":{"a":1}}';
  t.equal(JSON.stringify(parseJson(Buffer.from(reachingForNothing))), reachingForNothing);
  const clean = fc
    .jsonValue()
    .map((value) => JSON.stringify(value))
    .filter((text) => !/__proto__|prototype|\\u0000|\\ud/.test(text));
  fc.assert(fc.property(clean, (text) => t.strictSame(parseJson(Buffer.from(text)), JSON.parse(text))));
});

t.test('a message tells where JSON is wrong, and no position that the body itself speaks of', async (t) => {
  const parsing = (text: string) => () => parseJson(Buffer.from(text));
  t.throws(parsing('{"a" 1}'), { message: 'body: is not valid JSON, at character 6' });
  t.throws(parsing('x at position 42'), { message: /is not valid JSON$/ });
});
