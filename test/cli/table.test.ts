import t from 'tap';
import { type Shorten, shortName } from '../../src/cli/shorten.ts';
import { type Column, fields, table } from '../../src/cli/table.ts';
import { escapedIn, printable } from '../../src/printable.ts';

interface Row {
  id: string;
  name: string;
  note: string;
}

const COLUMNS: Column<Row>[] = [
  { title: 'ID', of: ({ id }) => id },
  { title: 'NAME', of: ({ name }) => name, shorten: shortName },
  { title: 'NOTE', of: ({ note }) => note, shorten: shortName },
];

/** A terminal of this width without colours; null: none. */
function plain(columns: number | null) {
  return { columns, colours: false };
}

t.test('columns are aligned under their titles', async (t) => {
  const rows = [
    { id: 'a', name: 'website', note: 'x' },
    { id: 'bcd', name: 'api', note: '' },
  ];
  t.equal(table(plain(null), rows, COLUMNS), 'ID   NAME     NOTE\na    website  x\nbcd  api');
});

t.test('an empty column is left out', async (t) => {
  t.equal(table(plain(80), [{ id: 'a', name: 'website', note: '' }], COLUMNS), 'ID  NAME\na   website');
});

t.test('a table of 300,000 rows does not overflow the call stack', async (t) => {
  const rows = new Array(300_000).fill({ id: 'a', name: '', note: '' });
  t.equal(table(plain(null), rows, COLUMNS).length, 'ID'.length + rows.length * '\na'.length);
});

t.test('on a narrow terminal the widest column that can be shortened is, an id never', async (t) => {
  const rows = [{ id: 'x'.repeat(20), name: 'n'.repeat(30), note: 'short one' }];
  const lines = table(plain(50), rows, COLUMNS).split('\n');
  t.equal(lines[1], `${'x'.repeat(20)}  ${'n'.repeat(16)}…  short one`);
  t.ok(lines.every((line) => line.length <= 50));
  t.ok(table(plain(null), rows, COLUMNS).includes('n'.repeat(30)), 'without a terminal nothing is cut');
});

t.test(
  'where all columns fit, or no terminal is, nothing is shortened, not even to measure it',
  async (t) => {
    const shortened: string[] = [];
    const shorten: Shorten = (text, width) => {
      shortened.push(text);
      return shortName(text, width);
    };
    const columns: Column<Row>[] = [{ title: 'NAME', of: ({ name }) => name, shorten }];
    const name = 'n'.repeat(30);
    for (const width of [null, 30]) {
      t.equal(table(plain(width), [{ id: '', name, note: '' }], columns), `NAME\n${name}`);
    }
    t.strictSame(shortened, []);
  },
);

t.test('a title is never cut', async (t) => {
  const columns = [...COLUMNS, { title: 'LAST FAILURE', of: () => 'x'.repeat(30), shorten: shortName }];
  const rows = [{ id: 'a', name: 'website', note: '' }];
  t.equal(table(plain(25), rows, columns).split('\n')[0], 'ID  NAME     LAST FAILURE');
});

t.test('a column that wraps is broken between words under its title, and nothing of it is cut', async (t) => {
  const columns: Column<Row>[] = [
    { title: 'ID', of: ({ id }) => id, colour: () => 'red' },
    { title: 'NOTE', of: ({ note }) => note, wraps: true },
  ];
  const rows = [
    { id: 'a', name: '', note: `one two three four five /${'x'.repeat(30)} six` },
    { id: 'b', name: '', note: 'short' },
  ];
  const wrapped = `ID  NOTE\na   one two three\n    four five\n    /${'x'.repeat(30)}\n    six\nb   short`;
  t.equal(table(plain(20), rows, columns), wrapped);
  t.equal(table({ columns: 20, colours: true }, rows, columns).replaceAll(/\p{Cc}\[\d+m/gu, ''), wrapped);
  t.equal(table(plain(null), rows, columns).split('\n')[1], `a   ${rows[0]?.note}`);
  t.match(table(plain(10), rows, columns), /^ID {4}a\nNOTE {2}one\n/, 'where no room is, a block');
});

t.test('if the table is still too wide, each row is printed as a block of fields', async (t) => {
  const rows = [
    { id: 'x'.repeat(20), name: 'website', note: '' },
    { id: 'y'.repeat(20), name: 'a name of several words', note: 'z' },
  ];
  t.equal(
    table(plain(28), rows, COLUMNS),
    `ID    ${'x'.repeat(20)}\nNAME  website\n\n` +
      `ID    ${'y'.repeat(20)}\nNAME  a name of several\n      words\nNOTE  z`,
  );
});

t.test('wide characters count as two columns', async (t) => {
  const rows = [
    { id: '1', name: '日本語', note: 'x' },
    { id: '2', name: 'abcdef', note: 'y' },
    { id: '3', name: '🚢 é', note: 'z' },
    { id: '4', name: '한글', note: 'ＡＢ。' },
    { id: '5', name: '⚠️', note: 'ｶﾀｶﾅ' },
  ];
  t.equal(
    table(plain(80), rows, [...COLUMNS, { title: 'END', of: () => '|' }]),
    [
      'ID  NAME    NOTE    END',
      '1   日本語  x       |',
      '2   abcdef  y       |',
      '3   🚢 é    z       |',
      '4   한글    ＡＢ。  |',
      '5   ⚠️      ｶﾀｶﾅ    |',
    ].join('\n'),
  );
  t.equal(
    table(plain(12), [{ id: '1', name: '日本語日本語', note: '' }], COLUMNS).split('\n')[1],
    '1   日本語…',
  );
});

t.test('control, bidirectional and invisible characters are escaped in tables and fields', async (t) => {
  t.equal(printable('a\u001b[2Jb\nc\u009bd\u2028\u2029'), 'a\\x1b[2Jb\\x0ac\\x9bd\\u2028\\u2029');
  t.equal(printable('a\u202etxt.exe \u2066b\u200bc\ufeff'), 'a\\u202etxt.exe \\u2066b\\u200bc\\ufeff');
  t.equal(printable('a\u00adb\u034fc\u2800\u3164\u{e0041}'), 'a\\xadb\\u034fc\u2800\\u3164\\u{e0041}');
  for (const text of ['日本語 é 🚢', '👩‍👩‍👧‍👦 ⚠️ 🇩🇪', 'שלום עולם', '葛\u{e0100}', 'می\u200cخواهم'])
    t.equal(printable(text), text);
  t.equal(
    table(plain(80), [{ id: '\u001b[31m', name: 'x', note: '' }], COLUMNS),
    'ID        NAME\n\\x1b[31m  x',
  );
  t.equal(fields({ columns: 80 }, [['name', '\u0007']]), 'name  \\x07');
});

t.test('escaped JSON keeps its value and holds no control characters', async (t) => {
  const value = { message: 'a\u009b31m\u202eb\u2028\u007f\u001b\u{e0041}', list: ['é 🚢'] };
  const json = escapedIn(JSON.stringify(value, null, 2));
  t.strictSame(JSON.parse(json), value);
  t.equal(printable(json.replaceAll('\n', '')), json.replaceAll('\n', ''));
  t.match(json, /\\u009b31m\\u202eb.*\n.*\n +"é 🚢"/);
});

t.test('fields are aligned, and long values wrap under themselves', async (t) => {
  const entries = [
    ['id', 'prj_1'],
    ['gone', null],
    ['empty', ''],
    ['variables', 'ALPHA BETA GAMMA DELTA'],
  ] as const;
  t.equal(fields({ columns: null }, entries), 'id         prj_1\nempty\nvariables  ALPHA BETA GAMMA DELTA');
  t.equal(
    fields({ columns: 22 }, entries),
    'id         prj_1\nempty\nvariables  ALPHA BETA\n           GAMMA DELTA',
  );
});

t.test('colours do not change the width of a cell, and appear only where they are shown', async (t) => {
  const rows = [
    { id: 'a', name: 'failed', note: 'x' },
    { id: 'b', name: 'fine', note: 'y' },
    { id: 'c', name: '', note: 'z' },
  ];
  const columns = COLUMNS.map((column) =>
    column.title === 'NAME'
      ? { ...column, colour: ({ name }: Row) => (name === 'failed' ? undefined : ('red' as const)) }
      : column,
  );
  t.equal(table(plain(80), rows, columns), 'ID  NAME    NOTE\na   failed  x\nb   fine    y\nc           z');
  t.equal(
    table({ columns: 80, colours: true }, rows, columns),
    'ID  NAME    NOTE\na   failed  x\nb   \u001b[31mfine\u001b[39m    y\nc           z',
  );
});
