import { mkdirSync } from 'node:fs';
import t from 'tap';
import { codeOf, messageOf } from '../src/errors.ts';

t.test('an error is told by its code and its message', async (t) => {
  const missing = thrownBy(() => mkdirSync('/nowhere/below'));
  t.equal(codeOf(missing), 'ENOENT');
  t.equal(messageOf(missing), "ENOENT: no such file or directory, mkdir '/nowhere/below'");
  t.equal(codeOf(new Error('no code')), 'Error: no code');
  t.equal(codeOf('a text'), 'a text');
  t.equal(messageOf('a text'), 'a text');
});

t.test('an error that Node cannot name is named as errno(3) does', async (t) => {
  for (const [number, name, text] of [
    [-122, 'EDQUOT', 'disk quota exceeded'],
    [-117, 'EUCLEAN', 'structure needs cleaning'],
    [-116, 'ESTALE', 'stale file handle'],
  ]) {
    // As Node makes them: there is no quota here to be used up.
    const code = `Unknown system error ${number}`;
    const error = Object.assign(new Error(`${code}: ${code}, mkdtemp '/tmp/x'`), { code, errno: number });
    t.equal(codeOf(error), name);
    t.equal(messageOf(error), `${name}: ${text}, mkdtemp '/tmp/x'`);
  }
  const other = Object.assign(new Error('Unknown system error -999'), { code: 'Unknown system error -999' });
  t.equal(codeOf(other), 'Unknown system error -999');
  t.equal(messageOf(other), 'Unknown system error -999');
});

function thrownBy(action: () => void): unknown {
  try {
    action();
  } catch (error) {
    return error;
  }
  throw new Error('it throws nothing');
}
