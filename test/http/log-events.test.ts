import { once } from 'node:events';
import { createServer, request as httpRequest } from 'node:http';
import { setImmediate as nextTurn } from 'node:timers/promises';
import fc from 'fast-check';
import t from 'tap';
import { Agent, EventSource } from 'undici';
import type { DeploymentId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { createLogEvents } from '../../src/http/log-events.ts';
import { createWatches } from '../../src/http/watches.ts';
import { logChange } from '../../src/store/changes.ts';
import { until } from '../helpers/commands.ts';
import { startDeploymentsHttp, startExecutor } from '../helpers/deploying.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { openEvents, parseEvents, textOf } from '../helpers/events.ts';
import { requestJson } from '../helpers/http.ts';
import { append, finish, print, running, textAt } from '../helpers/logs.ts';
import { newDeployment, reportFor, testStore } from '../helpers/store.ts';
import { countWatches } from '../helpers/watches.ts';

t.test('events follow a command from before its start to its end', async (t) => {
  const store = testStore(t, realEffects);
  const http = await startDeploymentsHttp(t, { store });
  const projectId = await store.project({
    command: ['/bin/sh', '-c', 'echo begin; echo; printf "  é\\r\\n50%%\\r100%%"; sleep 0.3; exit 3'],
  });
  const { secret: key } = await store.key();
  const { body } = await requestJson(http.port, 'POST', `/v2/projects/${projectId}/deployments`, {
    key,
    body: { ref: 'main' },
  });
  const { id } = body as { id: DeploymentId };
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  t.equal(stream.status, 200);
  t.match(stream.headers, { 'content-type': 'text/event-stream; charset=utf-8', 'x-accel-buffering': 'no' });
  t.equal(http.store.reads.deployments.get(id)?.status, 'queued');

  await startExecutor(t, store);
  const events = await stream.rest();
  t.equal(textOf(events), 'begin\n\n  é\n50%\n100%', 'every line end becomes one line feed');
  t.strictSame(events.at(-1), { type: 'end', data: '{"status":"failed"}', id: '21' });
  t.equal(await textAt(http, id, key, ''), 'begin\n\n  é\r\n50%\r100%');
  await until(() => http.watches.size() === 0);
});

t.test('Last-Event-ID resumes a stream without a gap or a repetition', async (t) => {
  const { http, id, key } = await running(t);
  const path = `/v2/deployments/${id}/logs`;
  await print(http.store, id, 'one\ntwo\n');
  const first = await openEvents(t, http.port, path, key);
  const seen = await first.next();
  t.strictSame(seen, { type: 'message', data: 'one\ntwo\n', id: '8' });
  first.leave();
  await print(http.store, id, 'three\n');
  const headers = { 'last-event-id': seen?.id ?? '' };
  const second = await openEvents(t, http.port, `${path}?offset=0`, key, headers);
  t.strictSame(
    await second.next(),
    { type: 'message', data: 'three\n', id: '14' },
    'it takes precedence over ?offset',
  );
  await finish(http.store, id);
  t.strictSame(await second.rest(), [{ type: 'end', data: '{"status":"succeeded"}', id: '14' }]);
  const again = await openEvents(t, http.port, `${path}?offset=8`, key, { 'last-event-id': '0' });
  t.equal(textOf(await again.rest()), 'one\ntwo\nthree\n', '0 resumes from the first byte');
  const third = await openEvents(t, http.port, path, key, { 'last-event-id': '14' });
  t.match(await third.rest(), [{ type: 'end', id: '14' }], 'at the end there is only the end event');
  const largest = '9'.repeat(15);
  const beyond = await openEvents(t, http.port, `${path}?offset=${largest}`, key);
  t.match(await beyond.rest(), [{ type: 'end', id: largest }]);
  const resumed = await openEvents(t, http.port, path, key, { 'last-event-id': largest });
  t.match(await resumed.rest(), [{ type: 'end', id: largest }], 'the largest ?offset is an id, too');
});

t.test('an event stream begins at ?offset or ?tail', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'one\ntwo\n');
  const rows = [
    ['?offset=4', 'two\nthree\n'],
    ['?tail=4', 'two\nthree\n'],
    ['?tail=0', 'three\n'],
    ['?offset=10', 'ree\n'],
    ['?offset=100', ''],
  ] as const;
  const streams = await Promise.all(
    rows.map(([query]) => openEvents(t, http.port, `/v2/deployments/${id}/logs${query}`, key)),
  );
  await print(http.store, id, 'three\n');
  await finish(http.store, id);
  const texts = await Promise.all(streams.map(async (stream) => textOf(await stream.rest())));
  t.strictSame(
    texts,
    rows.map(([, text]) => text),
  );
});

t.test('events carry all that was printed, however split, and can be resumed at every id', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const projectId = await store.project();
  const { keyId } = await store.key();
  const watches = countWatches(createWatches(store.writer, effects));
  t.teardown(watches.close);
  const logEvents = createLogEvents(store.reads, realEffects);
  const mayFollow = () => true;

  // What breaks easily: line ends, characters of each length, parts of them, and bytes that are not UTF-8.
  const piece = fc.oneof(
    fc
      .constantFrom('\r', '\n', '\r\n', 'ä', '€', '😀', '\ufeff', '\0', ' data: x', 'a', '')
      .map((text) => Buffer.from(text)),
    fc.uint8Array({ maxLength: 3 }).map((bytes) => Buffer.from(bytes)),
    fc
      .constantFrom(
        [0xf0, 0x9f],
        [0x98, 0x80],
        [0xe2, 0x82],
        [0xac],
        [0xc3],
        [0xe0, 0x80],
        [0xed, 0xa0, 0x80],
      )
      .map((bytes) => Buffer.from(bytes)),
  );
  await fc.assert(
    fc.asyncProperty(fc.array(piece, { maxLength: 20 }), fc.nat({ max: 20 }), async (pieces, early) => {
      const { id } = await store.writer.write('deployments.create', newDeployment(projectId));
      for (const bytes of pieces.slice(0, early)) await print(store, id, bytes);
      const watch = watches.open([id, logChange(id)], keyId);
      const following = all(parseEvents(logEvents({ id, from: 0, watch, mayFollow })));
      for (const bytes of pieces.slice(early)) {
        await nextTurn();
        await print(store, id, bytes);
      }
      await finish(store, id);
      const events = await following;

      const printed = Buffer.concat(pieces);
      const normalised = (bytes: Buffer) =>
        new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes).replaceAll(/\r\n?/g, '\n');
      const said = textOf(events);
      if (said !== normalised(printed)) throw new Error(`${JSON.stringify(said)} was said`);
      for (const [index, { id: offset }] of events.entries()) {
        const rest = textOf(events.slice(index + 1));
        if (rest !== normalised(printed.subarray(Number(offset))))
          throw new Error(`an event was cut at ${offset}`);
      }
      watch.close();
      return events.at(-1)?.type === 'end';
    }),
    { numRuns: 100 },
  );
  t.equal(watches.size(), 0);
});

t.test('a stream has the log of its own deployment only, and nothing if that is unknown', async (t) => {
  const { http, id, keyId } = await running(t);
  const other = await http.store.writer.write(
    'deployments.create',
    newDeployment(await http.store.project({ name: 'api' })),
  );
  await http.store.writer.write('deployments.claim', undefined);
  await print(http.store, id, 'one\n');
  await print(http.store, other.id, 'two\n');
  const logEvents = createLogEvents(http.store.reads, realEffects);
  for (const [one, data] of [
    [id, 'one\n'],
    [other.id, 'two\n'],
    ['dpl_gone' as DeploymentId, undefined],
  ] as const) {
    const watch = http.watches.open([one], keyId);
    const { value } = await parseEvents(logEvents({ id: one, from: 0, watch, mayFollow: () => true })).next();
    t.equal(value?.data, data, one);
    watch.close();
  }
});

t.test('clients that are at the same offset of a log share each read of it', async (t) => {
  const { http, id, keyId } = await running(t);
  const { logs } = http.store.reads;
  let count = 0;
  const pieceAt: typeof logs.pieceAt = (...place) => {
    count += 1;
    return logs.pieceAt(...place);
  };
  const logEvents = createLogEvents({ ...http.store.reads, logs: { ...logs, pieceAt } }, realEffects);
  await print(http.store, id, 'one\n');
  const watches = [1, 2, 3].map(() => http.watches.open([id, logChange(id)], keyId));
  const streams = watches.map((watch) =>
    parseEvents(logEvents({ id, from: 0, watch, mayFollow: () => true })),
  );
  for (const stream of streams) t.match(await stream.next(), { value: { data: 'one\n' } });
  t.equal(count, 1);
  await print(http.store, id, 'two\n');
  for (const stream of streams) t.match(await stream.next(), { value: { data: 'two\n' } });
  t.equal(count, 2, 'which is not used beyond the next commit');
  for (const watch of watches) watch.close();
});

t.test('no event ends within a character or a CRLF', async (t) => {
  const { http, id, key } = await running(t);
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  const bytes = Buffer.from('a\r\nb€\rc😀ࠀ\u0080');
  const rows: [until: number, data: string, eventId: string][] = [
    [2, 'a', '1'],
    [3, '\n', '3'],
    [5, 'b', '4'],
    [6, '', ''],
    [8, '€', '7'],
    [12, '\nc', '9'],
    [13, '😀', '13'],
    [15, '', ''],
    [17, 'ࠀ', '16'],
    [18, '\u0080', '18'],
  ];
  let printed = 0;
  for (const [until, data, id2] of rows) {
    await print(http.store, id, bytes.subarray(printed, until));
    printed = until;
    if (id2 !== '') t.strictSame(await stream.next(), { type: 'message', data, id: id2 });
  }
  await print(http.store, id, Buffer.from([0x0d, 0xe2, 0x82]));
  await finish(http.store, id);
  t.strictSame(
    (await stream.rest()).map(({ data, id }) => [data, id]),
    [
      ['\n', '19'],
      ['\ufffd', '21'],
      ['{"status":"succeeded"}', '21'],
    ],
    'except at the end of the log',
  );
});

t.test('a stream says how many bytes were dropped before it could send them', async (t) => {
  const { http, id, key } = await running(t);
  await append(http.store, id, 0, Buffer.from('head\nmid'), 8);
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  t.match(await stream.next(), { data: 'head\nmid', id: '8' });
  await append(http.store, id, 108, Buffer.from('tail'), 112);
  t.match(await stream.next(), { data: '\n[davit: 100 bytes left out]\n', id: '108' });
  t.match(await stream.next(), { data: 'tail', id: '112' });
  const resumed = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key, { 'last-event-id': '8' });
  t.match(await resumed.next(), { data: '\n[davit: 100 bytes left out]\n', id: '108' });
  const other = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key, { 'last-event-id': '112' });
  http.store.execute('DELETE FROM log_chunks WHERE start > 0');
  await append(http.store, id, 200, Buffer.from('end\n'), 204);
  t.match(await stream.next(), { data: '\n[davit: 88 bytes left out]\n', id: '200' });
  t.match(await stream.next(), { data: 'end\n', id: '204' });
  const { data } = (await other.next()) ?? {};
  t.equal(
    data,
    '[davit: 88 bytes left out]\n',
    'a line of its own already, as it was sent nothing of the last one',
  );
});

t.test(
  'the line for bytes that were left out follows a line or a CR without an empty line between',
  async (t) => {
    const { http, id, key } = await running(t);
    const path = `/v2/deployments/${id}/logs`;
    await append(http.store, id, 0, Buffer.from('50%\r'), 4);
    await append(http.store, id, 104, Buffer.from('end\n'), 108);
    t.equal(await textAt(http, id, key, ''), '50%\r\n[davit: 100 bytes left out]\nend\n');
    const stream = await openEvents(t, http.port, path, key);
    for (const data of ['50%', '\n', '[davit: 100 bytes left out]\n', 'end\n'])
      t.equal((await stream.next())?.data, data);
    await append(http.store, id, 208, Buffer.from('more\n'), 213);
    t.equal((await stream.next())?.data, '[davit: 100 bytes left out]\n');
    const resumed = await openEvents(t, http.port, path, key, { 'last-event-id': '4' });
    t.equal((await resumed.next())?.data, '[davit: 100 bytes left out]\n');
  },
);

t.test('an idle stream sends keep-alive comments, and ends once its key is revoked', async (t) => {
  const effects = fakeEffects();
  const { http, id, key, keyId } = await running(t, effects);
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  const next = stream.next();
  for (const count of [1, 2, 3]) {
    await until(() => {
      effects.advance(15_000);
      return stream.comments.length >= count;
    });
  }
  t.equal(stream.comments[0], 'still here');
  await http.store.writer.write('keys.revoke', { id: keyId });
  effects.advance(15_000);
  t.equal(await next, undefined, 'the stream of a revoked key has no end event');
  await until(() => http.watches.size() === 0);
});

t.test('reports that bring no output do not put off the keep-alive comments', async (t) => {
  const effects = fakeEffects();
  const { http, key, keyId } = await running(t, effects);
  const { writer } = http.store;
  const projectId = await http.store.project({ name: 'elsewhere', command: null });
  const { id } = await writer.write('deployments.create', newDeployment(projectId));
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  const next = stream.next();
  for (let second = 0; second < 17; second++) {
    const message = `step ${second}`;
    if (second < 10) await writer.write('deployments.report', reportFor(id, { message }));
    await nextTurn();
    effects.advance(1_000);
    await nextTurn();
  }
  await writer.write('keys.revoke', { id: keyId });
  effects.advance(15_000);
  await next;
  t.strictSame(stream.comments, ['still here'], 'one every 15 s');
});

t.test('the greeting of a stream has the id from which a lost connection continues', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'before\n');
  const stream = await fetch(`http://127.0.0.1:${http.port}/v2/deployments/${id}/logs?tail=0`, {
    headers: { authorization: `Bearer ${key}`, accept: 'text/event-stream' },
  });
  const { value } = (await stream.body?.getReader().read()) ?? {};
  t.equal(Buffer.from(value ?? []).toString(), 'retry: 1000\nid: 7\n\n');
});

t.test('a stream has nothing that was printed after its key was revoked', async (t) => {
  const { http, id, key, keyId } = await running(t);
  await print(http.store, id, 'before\n');
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  t.match(await stream.next(), { data: 'before\n' });
  await http.store.writer.write('keys.revoke', { id: keyId });
  await print(http.store, id, 'after\n');
  t.equal(await stream.next(), undefined);
  await until(() => http.watches.size() === 0);
});

t.test('nor after its key expired', async (t) => {
  const effects = fakeEffects();
  const { http, id } = await running(t, effects);
  const { secret } = await http.store.key({ expiresInMs: 10_000 });
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, secret);
  await print(http.store, id, 'before\n');
  t.match(await stream.next(), { data: 'before\n' });
  effects.advance(10_000);
  await print(http.store, id, 'after\n');
  t.equal(await stream.next(), undefined);
});

t.test('a stream that is still catching up ends once its key is revoked', async (t) => {
  const { http, id, keyId } = await running(t, fakeEffects()); // so that no time passes
  await print(http.store, id, Buffer.alloc(100_000, 'x'));
  const watch = http.watches.open([id, logChange(id)], keyId);
  let isLive = true;
  const logEvents = createLogEvents(http.store.reads, realEffects);
  const events = parseEvents(logEvents({ id, from: 0, watch, mayFollow: () => isLive }));
  for (const eventId of ['16384', '32768']) t.match(await events.next(), { value: { id: eventId } });
  isLive = false;
  t.match(await events.next(), { done: true });
  watch.close();
});

t.test('an EventSource whose connection was cut resumes where it was', async (t) => {
  const store = testStore(t, realEffects);
  const { http, id, key } = await running(t, realEffects, store);
  // Between the two, a proxy that cuts the first connection.
  let connections = 0;
  const proxy = createServer((request, response) => {
    connections += 1;
    const isFirst = connections === 1;
    const onward = httpRequest({ port: http.port, path: request.url, headers: request.headers }, (answer) => {
      response.writeHead(answer.statusCode ?? 0, answer.headers);
      answer.on('data', (bytes) => {
        response.write(bytes);
        if (isFirst && String(bytes).includes('data')) response.destroy();
      });
      answer.on('end', () => response.end());
    });
    onward.on('error', () => {});
    response.on('close', () => onward.destroy());
    onward.end();
  });
  await once(proxy.listen(0, '127.0.0.1'), 'listening');
  t.teardown(() => proxy.close());
  const address = proxy.address();
  if (address === null || typeof address === 'string') throw new Error('the proxy has no port');

  const agent = new Agent().compose(
    (dispatch) => (options, handler) =>
      dispatch({ ...options, headers: { ...options.headers, authorization: `Bearer ${key}` } }, handler),
  );
  t.teardown(() => agent.close());
  await print(store, id, 'one\n');
  const source = new EventSource(`http://127.0.0.1:${address.port}/v2/deployments/${id}/logs`, {
    node: { dispatcher: agent },
  });
  t.teardown(() => source.close());
  let text = '';
  source.addEventListener('message', (event) => {
    text += event.data;
  });
  const ended = new Promise<string>((resolve) =>
    source.addEventListener('end', (event) => resolve((event as MessageEvent).data)),
  );
  await until(() => connections >= 1 && text !== '');
  await print(store, id, 'two\n');
  await until(() => connections >= 2);
  await print(store, id, 'three\n');
  await finish(store, id);
  t.equal(await ended, '{"status":"succeeded"}');
  source.close();
  t.equal(text, 'one\ntwo\nthree\n');
});

t.test('200 streams follow one deployment to its end, and leave no watch open', async (t) => {
  const { http, id, key } = await running(t);
  const streams = await Promise.all(
    Array.from({ length: 200 }, () => openEvents(t, http.port, `/v2/deployments/${id}/logs`, key)),
  );
  t.equal(http.watches.size(), 200);
  const texts = streams.map(async (stream) => textOf(await stream.rest()));
  const lines = Array.from({ length: 20 }, (_, index) => `line ${index} ${'x'.repeat(1_000)}\n`);
  for (const line of lines) await print(http.store, id, line);
  await finish(http.store, id);
  t.strictSame(new Set(await Promise.all(texts)), new Set([lines.join('')]));
  await until(() => http.watches.size() === 0);
});

t.test('the watch of a client that left is closed, whether it was idle or reading', async (t) => {
  const { http, id, key } = await running(t);
  const silent = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  await print(http.store, id, Buffer.alloc(8 * 1024 * 1024, 'x'));
  const inTheMiddle = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  t.equal(http.watches.size(), 2);
  await inTheMiddle.next();
  inTheMiddle.leave();
  silent.leave();
  await until(() => http.watches.size() === 0);
  t.pass();
});

async function all<Item>(items: AsyncIterable<Item>): Promise<Item[]> {
  const list: Item[] = [];
  for await (const item of items) list.push(item);
  return list;
}
