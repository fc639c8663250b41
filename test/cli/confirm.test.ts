import t from 'tap';
import { isYes } from '../../src/cli/confirm.ts';

t.test('y and yes are a yes, in capitals too, and nothing else is', async (t) => {
  for (const answer of ['y', 'Y', 'yes', 'Yes', 'YES']) t.ok(isYes(answer), answer);
  for (const answer of ['', 'n', 'no', 'deny', 'ye', 'yikes', 'yes, but', 'y n', 'not yes'])
    t.notOk(isYes(answer), answer);
});
