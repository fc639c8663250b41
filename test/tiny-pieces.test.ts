import t from 'tap';
import { areTooTiny } from '../src/tiny-pieces.ts';

t.test('a thousand pieces may have any size, and more only 32 bytes on average', async (t) => {
  t.equal(areTooTiny(1024, 0), false);
  t.equal(areTooTiny(1025, 1025 * 32 - 1), true);
  t.equal(areTooTiny(1025, 1025 * 32), false);
});
