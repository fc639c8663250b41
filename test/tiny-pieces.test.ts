import t from 'tap';
import { areTooTiny } from '../src/tiny-pieces.ts';

t.test('so many pieces may have any size, and more only 32 bytes on average', async (t) => {
  t.equal(areTooTiny(128, 0, 128), false);
  t.equal(areTooTiny(129, 129 * 32 - 1, 128), true);
  t.equal(areTooTiny(129, 129 * 32, 128), false);
});
