import fc from 'fast-check';
import t from 'tap';
import { readEvents, type ServerEvent } from '../../src/cli/event-stream.ts';

t.test('events are parsed as the HTML standard says', async (t) => {
  const cases: [text: string, events: Partial<ServerEvent>[]][] = [
    ['data: one\n\n', [{ type: 'message', data: 'one', lastEventId: '' }]],
    ['data:one\ndata\ndata: two\n\n', [{ data: 'one\n\ntwo' }]],
    ['data:  two spaces\n\n', [{ data: ' two spaces' }]],
    ['data: a: b\n\n', [{ data: 'a: b' }]],
    ['id: 7\nevent: end\ndata: {}\n\n', [{ type: 'end', data: '{}', lastEventId: '7' }]],
    [
      'id: 7\ndata: a\n\ndata: b\n\nid\ndata: c\n\n',
      [{ lastEventId: '7' }, { lastEventId: '7' }, { lastEventId: '' }],
    ],
    ['id: 7\ndata: a\n\nid: \0\ndata: b\n\n', [{ lastEventId: '7' }, { lastEventId: '7' }]],
    ['id: 9\n\ndata: a\n\n', [{ data: 'a', lastEventId: '9' }]],
    ['event: end\n\ndata: a\n\n', [{ type: 'message', data: 'a' }]],
    [': still here\n\nretry: 2000\n\ndata\n\n', [{ data: '' }]],
    ['\ufeffdata: a\n\n', [{ data: 'a' }]],
    ['data: a\r\ndata: b\r\n\r\ndata: c\r\rdata: d\n\n', [{ data: 'a\nb' }, { data: 'c' }, { data: 'd' }]],
    ['data: whole\n\ndata: broken off\n', [{ data: 'whole' }]],
    ['data: broken off', []],
  ];
  for (const [text, expected] of cases) {
    const events = await eventsOf([Buffer.from(text)]);
    t.strictSame(
      events,
      expected.map((event, index) => Object.assign({ ...events[index] }, event)),
      JSON.stringify(text),
    );
  }
});

t.test('events of up to 256 KiB are read, and what could fill the memory is refused', async (t) => {
  const most = 256 * 1024;
  const longest = `data: ${'x'.repeat(most - 1)}\n\n`;
  t.equal((await eventsOf([Buffer.from(longest + longest)])).length, 2);
  for (const [name, text] of Object.entries({
    'a long line': `data: ${'x'.repeat(most)}\n`,
    'many lines': `${`data: ${'x'.repeat(most / 4 - 1)}\n`.repeat(4)}data\n`,
    'no line at all': 'x'.repeat(most + 1),
  }))
    await t.rejects(eventsOf([Buffer.from(text)]), { code: 'conflict' }, name);
});

t.test('events are the same however the bytes are split', async (t) => {
  const bytes = Buffer.from('id: 3\r\ndata: grün\u2028🌊\r\ndata:\r\n\r\n: hm\r\rdata: b\n\n');
  const whole = await eventsOf([bytes]);
  t.strictSame(
    whole.map(({ data }) => data),
    ['grün\u2028🌊\n', 'b'],
  );
  await fc.assert(
    fc.asyncProperty(fc.array(fc.nat(bytes.length), { maxLength: 12 }), async (cuts) => {
      const places = [0, ...cuts.toSorted((one, other) => one - other), bytes.length];
      const pieces = places.slice(1).map((end, index) => bytes.subarray(places[index], end));
      t.strictSame(await eventsOf(pieces), whole);
    }),
    { numRuns: 50 },
  );
});

async function eventsOf(pieces: Uint8Array[]): Promise<ServerEvent[]> {
  const events: ServerEvent[] = [];
  for await (const event of readEvents(each(pieces))) events.push(event);
  return events;
}

async function* each(pieces: Uint8Array[]): AsyncGenerator<Uint8Array> {
  yield* pieces;
}
