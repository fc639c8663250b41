import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import fs, { mkdirSync, readdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { join } from 'node:path';
import fc from 'fast-check';
import t from 'tap';
import { OUTPUT_FILE_MAX_BYTES, type Outputs, parseOutputs, readOutputs } from '../../src/deploy/outputs.ts';
import { processorMs } from '../helpers/processor.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const NOT_UTF8 = 'DEPLOY_OUTPUT: it is not valid UTF-8: U+FFFD stands for what is not';

t.test('outputs are read from lines of name=value', async (t) => {
  t.strictSame(outputsOf('url=https://example.com/?a=b\n\nempty=\r\n_x1= spaces stay \nlast=no newline'), {
    outputs: { url: 'https://example.com/?a=b', empty: '', _x1: ' spaces stay ', last: 'no newline' },
    notes: [],
  });
  t.strictSame(outputsOf(''), { outputs: {}, notes: [] });
  t.strictSame(outputsOf('a=1\na=2\n'), { outputs: { a: '2' }, notes: [] });
});

t.test('an invalid output line is left out and noted without its value', async (t) => {
  const lines = [
    'hello world',
    '=nameless',
    'a-b=c',
    `${'n'.repeat(65)}=x`,
    `nul=a\0b`,
    `long=${'x'.repeat(4097)}`,
    `long=${'é'.repeat(2049)}`,
    `${'n'.repeat(64)}=${'x'.repeat(4096)}`,
    '__proto__=x',
    'good=yes',
  ];
  t.strictSame(outputsOf(lines.join('\n')), {
    outputs: { ['n'.repeat(64)]: 'x'.repeat(4096), good: 'yes' },
    notes: [
      'DEPLOY_OUTPUT: line 1 is not name=value',
      'DEPLOY_OUTPUT: line 2 has a name with other characters than letters a-z and A-Z, digits and _',
      'DEPLOY_OUTPUT: line 3 has a name with other characters than letters a-z and A-Z, digits and _',
      'DEPLOY_OUTPUT: line 4 has a name of more than 64 characters',
      'DEPLOY_OUTPUT: line 5 holds a NUL',
      'DEPLOY_OUTPUT: line 6 has a value of more than 4096 bytes',
      'DEPLOY_OUTPUT: line 7 has a value of more than 4096 bytes',
      'DEPLOY_OUTPUT: line 9 has the name __proto__, which is refused',
    ],
  });
  t.equal(outputsOf('-\n'.repeat(10)).notes.length, 10, 'ten are told, and no rest of none');
});

t.test('there are at most 100 outputs, and few notes', async (t) => {
  const text = Array.from({ length: 1000 }, (_, number) => `n${number}=${number}\n`).join('');
  const { outputs, notes } = outputsOf(`${text}n0=again\n`);
  t.equal(Object.keys(outputs).length, 100);
  t.equal(outputs['n0'], 'again', 'one that is there already may change');
  t.equal(notes.length, 11);
  t.equal(notes[0], 'DEPLOY_OUTPUT: line 101 would be more than 100 outputs');
  t.equal(notes[10], 'DEPLOY_OUTPUT: and 890 more');
});

t.test('tens of thousands of lines that are too short for a secret are not searched for one', (t) => {
  const usualMs = parseMs(Buffer.from('longname=longvalue\n'.repeat(3_000)));
  const ms = parseMs(Buffer.from('a\n'.repeat(OUTPUT_FILE_MAX_BYTES / 2)));
  t.ok(ms < usualMs * 5, `${ms} ms, usually ${usualMs} ms`);
  t.end();
});

t.test('an output file that is too long is read up to the limit, without the line that is cut', async (t) => {
  const line = `${'x'.repeat(50)}\n`;
  const text = `first=1\n${line.repeat(2000)}`;
  const cutInside = `first=1\nsecond=${'x'.repeat(4000)}\n${'='.repeat(OUTPUT_FILE_MAX_BYTES - 4100)}\nlast=${'y'.repeat(4000)}`;
  t.strictSame(outputsOf(text).outputs, { first: '1' });
  t.match(outputsOf(text).notes[0], 'longer than 65536 bytes');
  t.strictSame(Object.keys(outputsOf(cutInside).outputs), ['first', 'second']);
  const full = `${'a=1\n'.repeat(OUTPUT_FILE_MAX_BYTES / 4 - 1)}z=26`;
  t.strictSame(outputsOf(full), { outputs: { a: '1', z: '26' }, notes: [] }, 'the last byte allowed');
  const fuller = `${'a=1\n'.repeat(OUTPUT_FILE_MAX_BYTES / 4 - 1)}z=2\nb=3\n`;
  t.strictSame(outputsOf(fuller).outputs, { a: '1', z: '2' }, 'a line that ends with it');
});

t.test('outputs keep the rules for any text', async (t) => {
  const pieces = ['a', 'B', '_', '=', '\n', '\r\n', '\0', ' ', '-', 'é', '\ud800', 'name=value\n'];
  const property = fc.property(fc.array(fc.constantFrom(...pieces), { maxLength: 60 }), (text) => {
    const { outputs, notes } = outputsOf(text.join(''));
    for (const [name, value] of Object.entries(outputs)) {
      assert.match(name, /^[A-Za-z_][A-Za-z0-9_]{0,63}$/);
      assert.doesNotMatch(value, /[\0\n]/);
    }
    assert.ok(notes.length <= 11);
  });
  t.doesNotThrow(() => fc.assert(property));
});

t.test('secrets are masked in output values and refused in names', async (t) => {
  const secrets = ['QWxhZGRpbjpvcGVuIHNlc2FtZQ==', 'hunter2hunter2\n', 'TOKEN=12345678', 'production'];
  const lines = [
    'QWxhZGRpbjpvcGVuIHNlc2FtZQ==',
    'hunter2hunter2=ok',
    'token=hunter2hunter2',
    'url=//hunter2hunter2@host',
    'TOKEN=12345678',
    'production_url=https://production.example',
  ];
  const { outputs, notes } = parseOutputs(Buffer.from(`${lines.join('\n')}\ngood=1\n`), secrets);
  t.strictSame(outputs, {
    token: '***',
    url: '//***@host',
    production_url: 'https://***.example',
    good: '1',
  });
  t.strictSame(
    notes,
    [1, 2, 5].map((line) => `DEPLOY_OUTPUT: line ${line} would show a secret as a name`),
  );
});

t.test('invalid UTF-8 counts by its bytes', async (t) => {
  const { outputs, notes } = parseOutputs(
    Buffer.concat([Buffer.alloc(30_000, 0xff), Buffer.from('\ngood=1\n')]),
    [],
  );
  t.strictSame(outputs, { good: '1' });
  t.strictSame(notes, [NOT_UTF8, 'DEPLOY_OUTPUT: line 1 is not name=value']);
});

t.test('a character that the limit cuts is no invalid UTF-8', async (t) => {
  const long = `a=1\nb=${'é'.repeat(OUTPUT_FILE_MAX_BYTES)}`;
  for (const text of [long, `-${long}`]) {
    const read = Buffer.from(text).subarray(0, OUTPUT_FILE_MAX_BYTES + 1); // in one of the two it ends within a character
    t.notOk(parseOutputs(read, []).notes.includes(NOT_UTF8));
  }
  const { outputs, notes } = parseOutputs(
    Buffer.concat([Buffer.from('x=\xff\n', 'latin1'), Buffer.from(long)]),
    [],
  );
  t.strictSame(outputs, { x: '\ufffd', a: '1' });
  t.strictSame(notes, ['DEPLOY_OUTPUT: it is longer than 65536 bytes: the rest was not read', NOT_UTF8]);
});

t.test('the outputs of a file', async (t) => {
  const directory = temporaryDirectory(t);
  const path = (name: string) => join(directory, name);
  writeFileSync(path('plain'), Buffer.from('a=1\nb=\xff\n', 'latin1'));
  writeFileSync(path('long'), `a=1\n${'x'.repeat(100)}\n`.repeat(100_000));
  symlinkSync(path('plain'), path('link'));
  mkdirSync(path('directory'));
  execFileSync('mkfifo', [path('pipe')]);

  const descriptors = readdirSync('/proc/self/fd').length;
  t.strictSame(readOutputs(path('plain'), []), { outputs: { a: '1', b: '\ufffd' }, notes: [NOT_UTF8] });
  const long = readOutputs(path('long'), []);
  t.strictSame(long.outputs, { a: '1' });
  t.match(long.notes[0], /longer than 65536 bytes/);
  t.strictSame(readOutputs(path('missing'), []), { outputs: {}, notes: [] });
  t.strictSame(readOutputs(path('link'), []), {
    outputs: {},
    notes: ['DEPLOY_OUTPUT: it could not be read: ELOOP'],
  });
  t.strictSame(readOutputs(path('directory'), []), {
    outputs: {},
    notes: ['DEPLOY_OUTPUT: it is not a plain file'],
  });
  t.strictSame(readOutputs(path('pipe'), []), {
    outputs: {},
    notes: ['DEPLOY_OUTPUT: it is not a plain file'],
  });
  const { readSync: read } = fs;
  fs.readSync = () => {
    throw Object.assign(new Error('the disk'), { code: 'EIO' });
  };
  syncBuiltinESMExports();
  try {
    t.strictSame(readOutputs(path('plain'), []), {
      outputs: {},
      notes: ['DEPLOY_OUTPUT: it could not be read: EIO'],
    });
  } finally {
    fs.readSync = read;
    syncBuiltinESMExports();
  }
  t.equal(readdirSync('/proc/self/fd').length, descriptors, 'none stays open');
});

function outputsOf(text: string): Outputs {
  return parseOutputs(Buffer.from(text), []);
}

/** What it takes to read outputs beside a secret. */
function parseMs(bytes: Buffer): number {
  return processorMs(() => parseOutputs(bytes, ['secret-value']));
}
