import { Agent, type IncomingMessage, request } from 'node:http';
import { Duplex } from 'node:stream';
import { buffer } from 'node:stream/consumers';
import fc from 'fast-check';
import t from 'tap';
import { createAnswerReader } from '../../src/deliver/answer.ts';
import { AttemptError } from '../../src/deliver/attempt-error.ts';

/** What is made of an answer that comes in these pieces, after which the receiver closes the connection. */
function readPieces(pieces: readonly Buffer[]) {
  const reader = createAnswerReader();
  // What they are read into is overwritten by the next.
  const shared = Buffer.alloc(Math.max(0, ...pieces.map(({ length }) => length)));
  let isWhole = false;
  try {
    for (const piece of pieces) {
      isWhole = reader.feed(shared.subarray(0, piece.copy(shared)));
      if (isWhole) break;
    }
  } catch (error) {
    return { error: error instanceof AttemptError ? error.message : error };
  }
  const answer = reader.answer();
  if (answer === undefined) return { isWhole };
  const { kept, ...rest } = answer;
  return { isWhole, ...rest, body: Buffer.concat(kept).toString('latin1') };
}

const read = (text: string) => readPieces([Buffer.from(text, 'latin1')]);

/** The same text in pieces that end at these places. */
function cut(bytes: Buffer, places: readonly number[]): Buffer[] {
  const ends = [...new Set(places.map((place) => place % (bytes.length + 1)))].sort((a, b) => a - b);
  return [...ends, bytes.length].map((end, index) => bytes.subarray(ends[index - 1] ?? 0, end));
}

const answers = [
  ['HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello', { statusCode: 200, body: 'hello' }],
  ['\r\n\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n', { statusCode: 200 }],
  ['HTTP/1.1 200 \r\ncontent-length:0\r\n\r\n', { statusCode: 200, body: '' }],
  ['HTTP/1.1 204\r\nRetry-After: \t7 \r\n\r\n', { statusCode: 204, retryAfter: '7' }],
  ['HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n', { statusCode: 304, body: '' }],
  ['HTTP/1.1 999 Whatever\r\nContent-Length: 1\r\n\r\nx', { statusCode: 999 }],
  [
    'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a="b"\r\nhello\r\n00A \r\n, everyone\r\n0\r\nX: y\r\n\r\n',
    { body: 'hello, everyone', bodyBytes: 15 },
  ],
  ['HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, Chunked\r\n\r\n0\r\n\r\n', { body: '' }],
  ['HTTP/1.1 200 OK\r\nX-Long: a\r\n  b\r\n\tc\r\nContent-Length: 0\r\n\r\n', { statusCode: 200 }],
  [
    'HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n',
    { statusCode: 201 },
  ],
  ['HTTP/1.1 200 OK\r\nContent-Length: 0\r\nKeep-Alive: max=9, Timeout=30\r\n\r\n', { idleMs: 30_000 }],
  ['HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive\r\n\r\n', { keepsConnection: true }],
] as const;

t.test('a response is parsed however it is split', (t) => {
  for (const [text, expected] of answers) {
    const name = JSON.stringify(text);
    const whole = read(text);
    t.match(whole, { isWhole: true, keepsConnection: true, ...expected }, name);
    const bytes = Buffer.from(text, 'latin1');
    t.strictSame(readPieces([...bytes].map((byte) => Buffer.of(byte))), whole, `${name}, byte by byte`);
    fc.assert(
      fc.property(fc.array(fc.nat()), (places) => {
        t.strictSame(readPieces(cut(bytes, places)), whole);
      }),
      { numRuns: 20 },
    );
  }
  t.end();
});

t.test('a response without a length lasts until the connection closes', (t) => {
  t.match(read('HTTP/1.1 200 OK\r\n\r\nall of it'), {
    isWhole: false,
    body: 'all of it',
    keepsConnection: false,
  });
  for (const coding of ['gzip', 'chunked, gzip', 'unchunked']) {
    const text = `HTTP/1.1 200 OK\r\nTransfer-Encoding: ${coding}\r\n\r\nx`;
    t.match(read(text), { isWhole: false, body: 'x' }, coding);
  }
  t.end();
});

t.test('a response that breaks off is incomplete, and what came of it is known', (t) => {
  t.strictSame(read(''), { isWhole: false });
  t.strictSame(read('HTTP/1.1 200 OK\r\nContent-Le'), { isWhole: false });
  const head = { isWhole: false, statusCode: 200 };
  t.match(read('HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf'), { ...head, body: 'half' });
  const chunked = 'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n';
  for (const rest of ['', '5', '5\r\nhel', '5\r\nhello', '5\r\nhello\r\n', '0\r\n', '0\r\nX: y\r\n']) {
    t.match(read(chunked + rest), head, rest);
  }
  t.end();
});

t.test('a connection is not reused if the response closes it, has no length or is followed by bytes', (t) => {
  for (const text of [
    'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n',
    'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: x, CLOSE\r\n\r\n',
    'HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n',
    'HTTP/1.1 200 OK\r\n\r\n',
    'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhello',
    'HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\n\r\n',
  ]) {
    t.match(read(text), { keepsConnection: false }, text);
  }
  t.end();
});

t.test('bytes that are not an HTTP response are rejected', (t) => {
  const ok = 'HTTP/1.1 200 OK\r\n';
  for (const text of [
    'SSH-2.0-OpenSSH_9.2\r\n',
    ' HTTP/1.1 200 OK\r\n\r\n',
    'HTTP/2.0 200 OK\r\n\r\n',
    'HTTP/1.1 20 OK\r\n\r\n',
    'HTTP/1.1 2000 OK\r\n\r\n',
    'HTTP/1.1 099 OK\r\n\r\n',
    'HTTP/1.1  200 OK\r\n\r\n',
    'HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n',
    'HTTP/1.1 101 Switching Protocols\nUpgrade: x\n\n',
    'HTTP/1.1 200\rOK\n\n',
    `${ok}Transfer-Encoding: chunked\r\n\r\nx\r\n`,
    `${ok}Transfer-Encoding: chunked\r\n\r\n-1\r\n`,
    `${ok}Transfer-Encoding: chunked\r\n\r\n123456789\r\n`,
    `${ok}Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n`,
  ]) {
    t.strictSame(read(text), { error: 'invalid_response' }, JSON.stringify(text));
  }
  t.end();
});

t.test('of a malformed head the status counts, and the connection is not reused', (t) => {
  const ok = 'HTTP/1.1 200 OK\r\n';
  const end = '\r\nContent-Length: 0\r\n\r\n';
  for (const text of [
    'HTTP/1.1 200 OK\n\n',
    'HTTP/1.1 200\nContent-Length: 2\n\nok',
    `HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\n\n`,
    `${ok}colonless${end}`,
    `${ok}: no name${end}`,
    `${ok}a space : x${end}`,
    `${ok}X: a\0b${end}`,
    `${ok}X: a\rb${end}`,
    `${ok}Content-Length: -1\r\n\r\n`,
    `${ok}Content-Length: 1e3\r\n\r\n`,
    `${ok}Content-Length: 9999999999999999\r\n\r\n`,
    `${ok}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello`,
    `${ok}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n`,
    `${ok}X: ${'x'.repeat(17_000)}`,
  ]) {
    const expected = { statusCode: 200, isWhole: true, keepsConnection: false };
    t.match(read(text), expected, JSON.stringify(text.slice(0, 60)));
    t.match(readPieces(cut(Buffer.from(text, 'latin1'), [7, 20, 21])), expected);
  }
  t.match(read('HTTP/1.1 503 Busy\n\n'), { statusCode: 503, isWhole: true });
  t.end();
});

t.test('more than 16 KiB of heads, or 8 KiB of lines in the body, make a response invalid', (t) => {
  const ok = 'HTTP/1.1 200 OK\r\n';
  const chunked = 'Transfer-Encoding: chunked\r\n\r\n';
  for (const text of [
    '\r\n'.repeat(9_000),
    'HTTP/1.1 103 Early Hints\r\n\r\n'.repeat(700),
    `${ok}${chunked}1;${'x'.repeat(8_200)}`,
    `${ok}${chunked}${'1\r\nx\r\n'.repeat(1_640)}`,
    `${ok}${chunked}0\r\n${'X: y\r\n'.repeat(1_400)}`,
  ]) {
    t.strictSame(read(text), { error: 'invalid_response' }, text.slice(0, 60));
  }
  const head = `${ok}X: ${'x'.repeat(16_000)}\r\n${chunked}`;
  t.match(read(`${head}${'1\r\nx\r\n'.repeat(1_637)}0\r\n\r\n`), { isWhole: true, bodyBytes: 1_637 });
  t.end();
});

t.test('4 KiB of a body are kept, and all of it is counted', (t) => {
  const text = `HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n${'x'.repeat(100_000)}`;
  t.strictSame(readPieces(cut(Buffer.from(text), [50, 4_000, 5_000])), {
    isWhole: true,
    statusCode: 200,
    retryAfter: null,
    bodyBytes: 100_000,
    keepsConnection: true,
    idleMs: null,
    body: 'x'.repeat(4_096),
  });
  t.end();
});

t.test('what is kept of a body keeps no other memory alive', (t) => {
  const reader = createAnswerReader();
  reader.feed(Buffer.from('HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc'));
  t.strictSame(
    reader.answer()?.kept.map(({ buffer }) => buffer.byteLength),
    [3],
  );
  t.end();
});

/** An answer as servers make them. */
const anyAnswer = fc
  .record({
    version: fc.constantFrom('1.0', '1.1'),
    status: fc.integer({ min: 200, max: 599 }),
    headers: fc.dictionary(fc.stringMatching(/^X-[A-Za-z]{1,9}$/), fc.stringMatching(/^[!-~]{0,20}$/), {
      maxKeys: 4,
    }),
    chunks: fc.array(fc.uint8Array({ minLength: 1, maxLength: 300 }), { maxLength: 5 }),
    framing: fc.constantFrom('counted', 'chunked', 'untilClosed'),
  })
  .map(({ version, status, headers, chunks, framing }) => {
    const isChunked = framing === 'chunked' && version === '1.1';
    const length = chunks.reduce((sum, chunk) => sum + chunk.length, 0);
    const fields = {
      ...headers,
      'Retry-After': '5',
      ...(framing === 'counted' && { 'Content-Length': length }),
      ...(isChunked && { 'Transfer-Encoding': 'chunked' }),
    };
    const lines = Object.entries(fields).map(([name, value]) => `${name}: ${value}\r\n`);
    const hasBody = status !== 204 && status !== 304;
    const pieces = chunks.flatMap((chunk) =>
      isChunked
        ? [Buffer.from(`${chunk.length.toString(16)}\r\n`), Buffer.from(chunk), Buffer.from('\r\n')]
        : [Buffer.from(chunk)],
    );
    return Buffer.concat([
      Buffer.from(`HTTP/${version} ${status} Some Reason\r\n${lines.join('')}\r\n`),
      ...(hasBody ? pieces : []),
      ...(hasBody && isChunked ? [Buffer.from('0\r\n\r\n')] : []),
    ]);
  });

t.test('responses are parsed as by the HTTP client of Node', async (t) => {
  await fc.assert(
    fc.asyncProperty(anyAnswer, fc.array(fc.nat(), { maxLength: 6 }), async (bytes, places) => {
      const answer = await nodesAnswer(bytes);
      const body = await buffer(answer);
      const hasLength = 'content-length' in answer.headers || 'transfer-encoding' in answer.headers;
      t.match(readPieces(cut(bytes, places)), {
        isWhole: hasLength || answer.statusCode === 204 || answer.statusCode === 304,
        statusCode: answer.statusCode,
        retryAfter: answer.headers['retry-after'],
        bodyBytes: body.length,
        body: body.toString('latin1').slice(0, 4_096),
      });
    }),
    { numRuns: 100 },
  );
});

/** What Node makes of these bytes, after which the connection is closed. */
function nodesAnswer(bytes: Buffer): Promise<IncomingMessage> {
  const connection = new Duplex({
    read() {},
    write(_chunk, _encoding, done) {
      done();
    },
  });
  return new Promise((resolve, reject) => {
    const agent = Object.assign(new Agent(), { createConnection: () => connection });
    request({ agent, method: 'POST' }, resolve)
      .on('error', reject)
      .end(() => {
        connection.push(bytes);
        connection.push(null);
      });
  });
}

t.test('any bytes are a response, the beginning of one, or rejected', (t) => {
  const fragment = fc.oneof(
    fc.constantFrom('HTTP/1.1 200 OK', '\r\n', '\r\n\r\n', 'Content-Length: ', 'Transfer-Encoding: chunked'),
    fc.constantFrom('5', '0', ';', ':', ' ', '\n', '\r', '\0', 'Connection: close', 'HTTP/1.1 100 x'),
    fc.string({ unit: 'binary', maxLength: 9 }),
  );
  fc.assert(
    fc.property(fc.array(fragment, { maxLength: 20 }), fc.array(fc.nat()), (fragments, places) => {
      const read = readPieces(cut(Buffer.from(fragments.join('')), places));
      if ('error' in read) t.equal(read.error, 'invalid_response');
    }),
    { numRuns: 2_000 },
  );
  t.end();
});
