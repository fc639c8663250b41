import { PassThrough } from 'node:stream';
import t from 'tap';
import { createTerminal } from '../../src/cli/terminal.ts';

t.test('progress overwrites its own line, and a note replaces it', async (t) => {
  const { terminal, stderr } = streams({ isTTY: true, columns: 20 });
  terminal.progress('copying: 1 %');
  terminal.progress('copying: 99 % of very much');
  terminal.note('done');
  terminal.note('really');
  t.equal(
    String(stderr.read()),
    'copying: 1 %\r\u001b[Kcopying: 99 % of ve\r\u001b[Kdone\nreally\n',
    'no line is wider than the terminal',
  );
});

t.test('without a terminal there is no progress', async (t) => {
  const { terminal, stderr } = streams({});
  terminal.progress('copying: 1 %');
  terminal.note('done');
  t.equal(String(stderr.read()), 'done\n');
});

t.test('a terminal that knows no control sequences gets none', async (t) => {
  const { terminal, stderr } = streams({ isTTY: true }, { TERM: 'dumb' });
  terminal.progress('copying: 1 %');
  terminal.note('done');
  t.equal(String(stderr.read()), 'done\n');
});

function streams(kind: { isTTY?: boolean; columns?: number }, env = { TERM: 'xterm' }) {
  const make = () => Object.assign(new PassThrough(), kind);
  const [stdin, stdout, stderr] = [make(), make(), make()];
  return { terminal: createTerminal({ stdin, stdout, stderr, env }, () => undefined), stderr };
}
