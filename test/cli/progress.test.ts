import { PassThrough } from 'node:stream';
import t from 'tap';
import { createTerminal } from '../../src/cli/terminal.ts';

t.test(
  'progress is a line that the next takes the place of, and that nothing else is mixed with',
  async (t) => {
    const { terminal, stderr } = streams({ isTTY: true, columns: 20 });
    terminal.progress('copying: 1 %');
    terminal.progress('copying: 99 % of very much');
    terminal.note('done');
    terminal.note('really');
    t.equal(
      String(stderr.read()),
      'copying: 1 %\r\u001b[Kcopying: 99 % of ve\r\u001b[Kdone\nreally\n',
      'none is wider than the terminal',
    );
  },
);

t.test('where nobody watches there is none', async (t) => {
  const { terminal, stderr } = streams({});
  terminal.progress('copying: 1 %');
  terminal.note('done');
  t.equal(String(stderr.read()), 'done\n');
});

function streams(kind: { isTTY?: boolean; columns?: number }) {
  const make = () => Object.assign(new PassThrough(), kind);
  const [stdin, stdout, stderr] = [make(), make(), make()];
  return { terminal: createTerminal({ stdin, stdout, stderr }, () => undefined), stderr };
}
