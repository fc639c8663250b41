import t from 'tap';
import { createLogOutput } from '../../src/cli/log-output.ts';

t.test('a log on a terminal looks the same however its bytes are split', async (t) => {
  const digits = '1'.repeat(32);
  const rows: [log: string | Buffer, shown: string, withoutColours?: string][] = [
    ['', ''],
    ['\ufeffgrün\n', '\ufeffgrün\n'],
    ['one\r\n', 'one\r\n'],
    ['50%\r100%', '50%\r100%\n'],
    ['a\u001b[1;31mred', 'a\u001b[1;31mred\u001b[0m\n', 'ared\n'],
    ['a\u001b[31mred\u001b[0m\n', 'a\u001b[31mred\u001b[0m\n\u001b[0m', 'ared\n'],
    [`\u001b[${digits}m\n`, `\u001b[${digits}m\n\u001b[0m`, '\n'],
    [`\u001b[${digits}1m\n`, `\\x1b[${digits}1m\n`],
    ['building\n[2m30s] done\r[m\t[1m x\n', 'building\n[2m30s] done\r[m\t[1m x\n'],
    ['a\u001b[32', 'a\\x1b[32\n'],
    ['a\u001b', 'a\\x1b\n'],
    ['\u001b\u001b[2J\u0007', '\\x1b\\x1b[2J\\x07\n'],
    ['\u009b31m\tx\u2028\u0000\n', '\\x9b31m\tx\\u2028\\x00\n'],
    ['\u202efdp\u202c\u2066x\u2069\n', '\\u202efdp\\u202c\\u2066x\\u2069\n'],
    [Buffer.from([0x61, 0xc3]), 'a\ufffd\n'],
  ];
  for (const [row, [log, coloured, plain = coloured]] of rows.entries()) {
    const bytes = Buffer.from(log);
    for (const size of [1, 2, 3, 5, 100]) {
      for (const colours of [true, false]) {
        let shown = '';
        const write = async (piece: Uint8Array) => {
          shown += Buffer.from(piece);
          return true;
        };
        const output = createLogOutput({ columns: 80, colours, write });
        for (let at = 0; at < bytes.length; at += size) await output.write(bytes.subarray(at, at + size));
        await output.end();
        t.equal(shown, colours ? coloured : plain, `row ${row} by ${size}`);
      }
    }
  }
});

t.test('a terminal gets its own colours back only if the log has set others', async (t) => {
  for (const [log, colours, restored] of [
    ['plain\n', true, ''],
    ['\u001b[31mred\n', false, ''],
    ['\u001b[31mred\n', true, '\u001b[0m'],
  ] as const) {
    const pieces: string[] = [];
    const write = async (piece: Uint8Array) => pieces.push(String(Buffer.from(piece))) > 0;
    const output = createLogOutput({ columns: 80, colours, write });
    await output.write(Buffer.from(log));
    const before = pieces.length;
    await output.end();
    t.equal(pieces.slice(before).join(''), restored, log);
  }
});
