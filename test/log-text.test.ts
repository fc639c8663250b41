import { stripVTControlCharacters } from 'node:util';
import t from 'tap';
import { logText } from '../src/log-text.ts';
import { printable } from '../src/printable.ts';

const ESCAPE = '\u001b';

const OBEYED = /[\p{Cc}\u2028]/u;

const REQUEST = {
  level: 'info',
  time: '2026-11-21T08:00:00.000Z',
  request_id: 'req_1',
  key_id: null,
  method: 'GET',
  route: '/v2/projects/{project_id}',
  status: 200,
  duration_ms: 1.25,
  msg: 'request',
};

t.test('a line has time, level, message and fields', async (t) => {
  t.equal(
    logText(`${JSON.stringify(REQUEST)}\n`, false),
    '2026-11-21T08:00:00.000Z INFO  request request_id=req_1 key_id=null method=GET ' +
      'route=/v2/projects/{project_id} status=200 duration_ms=1.25\n',
  );
});

t.test('a value that is not one word stands in quotes', async (t) => {
  const line = {
    level: 'warn',
    time: 'now',
    msg: 'm',
    a: 'two words',
    b: '',
    c: 'x="y"',
    d: [1, { e: 'f' }],
    e: 'x=y',
    f: 'x"y',
    g: 'x\ty',
  };
  t.equal(
    logText(JSON.stringify(line), false),
    'now WARN  m a="two words" b="" c="x=\\"y\\"" d=[1,{"e":"f"}] e="x=y" f="x\\"y" g="x\\ty"\n',
  );
});

t.test('the stack of an error, and of what caused it, comes below', async (t) => {
  const err = {
    type: 'Error',
    message: 'outer',
    stack: 'Error: outer\n    at one.ts:1',
    cause: { type: 'Error', message: 'inner', stack: 'Error: inner\n    at two.ts:2' },
  };
  t.equal(
    logText(JSON.stringify({ level: 'error', time: 'now', msg: 'bug', request_id: 'req_1', err }), false),
    'now ERROR bug request_id=req_1\n    Error: outer\n        at one.ts:1\n    caused by\n    Error: inner\n        at two.ts:2\n',
  );
  t.equal(
    logText(JSON.stringify({ level: 'error', time: 'now', msg: 'bug', err: { message: 'no stack' } }), false),
    'now ERROR bug\n    no stack\n',
  );
});

t.test('control characters in a log line are escaped', async (t) => {
  const texts = ['a\u001b[2Jb\u009b31m\u0007\r\n\u2028c', 'one\u001b[2Jword\u0007'].flatMap(linesWith);
  for (const text of texts) {
    // Escaped, as the TAP parser misses an assertion whose name has a line separator in it.
    const name = printable(text);
    t.notMatch(logText(text, false).replaceAll('\n', ''), OBEYED, name);
    t.notMatch(stripVTControlCharacters(logText(text, true)).replaceAll('\n', ''), OBEYED, name);
  }
});

function linesWith(evil: string): string[] {
  const lines = [
    { level: 'info', time: 'now', msg: evil },
    { level: evil, time: evil, msg: 'm' },
    { level: 'info', time: 'now', msg: 'm', value: evil, [evil]: 1, list: [evil] },
    { level: 'info', time: 'now', msg: 'm', err: { message: evil } },
    { level: 'info', time: 'now', msg: 'm', err: { stack: evil, cause: { message: evil } } },
  ].map((line) => JSON.stringify(line));
  return [...lines, evil, `{"broken ${evil}`, JSON.stringify(evil)];
}

t.test('text that is not a JSON log line is shown as it is', async (t) => {
  for (const text of ['(node:1) Warning: of Node', '{"broken', '"text"', 'null', '5'])
    t.equal(logText(`${text}\n`, false), `${text}\n`);
  t.equal(logText('{"err":null}', false), 'null NULL  null\n');
});

t.test('colours are there only if they are asked for', async (t) => {
  const [plain, coloured] = [false, true].map((colours) => logText(JSON.stringify(REQUEST), colours));
  t.notOk(plain?.includes(ESCAPE));
  t.ok(coloured?.includes(`${ESCAPE}[32mINFO`));
  t.equal(stripVTControlCharacters(coloured ?? ''), plain);
  const levels = ['debug', 'info', 'warn', 'error', 'fatal'].map((level) => {
    const text = logText(JSON.stringify({ ...REQUEST, level }), true);
    return text
      .slice(0, text.search(/[A-Z]{4}/))
      .split(' ')
      .at(-1);
  });
  t.equal(new Set(levels).size, levels.length, 'each level has its own colour');
});
