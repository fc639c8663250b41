import { once } from 'node:events';
import { createServer, request as httpRequest } from 'node:http';
import type { Socket } from 'node:net';
import { Readable } from 'node:stream';
import { setImmediate as nextTurn } from 'node:timers/promises';
import fc from 'fast-check';
import t, { type Test } from 'tap';
import { Agent, EventSource } from 'undici';
import type { DeploymentId, KeyId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { createLogEvents } from '../../src/http/log-events.ts';
import { createWatches } from '../../src/http/watches.ts';
import { logChange } from '../../src/store/changes.ts';
import { until } from '../helpers/commands.ts';
import { type DeploymentsHttp, startDeploymentsHttp, startExecutor } from '../helpers/deploying.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { openEvents, parseEvents, textOf } from '../helpers/events.ts';
import { connectRaw, requestJson, toldBy } from '../helpers/http.ts';
import { endOf, newDeployment, type TestStore, testStore } from '../helpers/store.ts';
import { countWatches } from '../helpers/watches.ts';

t.test('a log is served byte for byte as it was printed, from ?offset or the last ?tail bytes', async (t) => {
  const { http, id, key } = await running(t);
  const bytes = Buffer.from(Array.from({ length: 200_000 }, (_, index) => (index * 7) % 256));
  await print(http.store, id, bytes);
  const rows: [query: string, from: number][] = [
    ['', 0],
    ['?offset=0', 0],
    ['?offset=65536', 65_536],
    ['?offset=199999', 199_999],
    ['?offset=200000', 200_000],
    ['?offset=200001', 200_001],
    ['?offset=999999999999999', 999_999_999_999_999],
    ['?tail=0', 200_000],
    ['?tail=1', 199_999],
    ['?tail=200000', 0],
    ['?tail=200001', 0],
    ['?tail=9007199254740991', 0],
  ];
  for (const [query, from] of rows) {
    const response = await getLog(http, id, key, query);
    t.equal(response.status, 200, query);
    t.equal(response.headers.get('content-type'), 'text/plain; charset=utf-8');
    t.equal(response.headers.get('log-next-offset'), String(Math.max(from, 200_000)), query);
    t.ok(Buffer.from(await response.arrayBuffer()).equals(bytes.subarray(from)), query);
  }
});

t.test('Log-Next-Offset continues a running log where the last answer ended', async (t) => {
  const { http, id, key } = await running(t);
  let read = '';
  let offset = '0';
  for (const text of ['', 'one\n', 'tw', 'o\n', '']) {
    if (text !== '') await print(http.store, id, text);
    const response = await getLog(http, id, key, `?offset=${offset}`);
    read += await response.text();
    offset = response.headers.get('log-next-offset') ?? 'none';
  }
  t.equal(read, 'one\ntwo\n');
  t.equal(offset, '8');
});

t.test('a line says how many bytes are left out of the middle, and offsets count these', async (t) => {
  const { http, id, key } = await running(t);
  for (const [start, text] of [
    [0, 'head\n'],
    [100_005, 'tail\n'],
  ] as const) {
    await append(http.store, id, start, Buffer.from(text), start + text.length);
  }
  t.equal(await textAt(http, id, key, ''), 'head\n[davit: 100000 bytes left out]\ntail\n');
  t.equal(await textAt(http, id, key, '?offset=50005'), '[davit: 50000 bytes left out]\ntail\n');
  t.equal(await textAt(http, id, key, '?tail=7'), '[davit: 2 bytes left out]\ntail\n');
  t.equal((await getLog(http, id, key, '')).headers.get('log-next-offset'), '100010');
});

t.test('a malformed log request is 400, whether the deployment exists or not', async (t) => {
  const { http, id, key } = await running(t);
  const events = { accept: 'text/event-stream' };
  const rows: [query: string, headers: Record<string, string>, says: RegExp | null][] = [
    ['?offset=1&tail=1', {}, /tail: must not be sent together with offset/],
    ['?offset=0&tail=0', {}, /tail: must not be sent together with offset/],
    ['?offset=-1', {}, /offset: must be a whole number/],
    ['?offset=1.5', {}, /offset: must be a whole number/],
    ['?offset=1000000000000000', {}, /offset: must be a whole number/],
    ['?tail=', {}, /tail: must not be empty/],
    ['?tail=1&tail=2', {}, /tail: must not be repeated/],
    ['?follow=1', {}, /follow: is not allowed/],
    ['', { ...events, 'last-event-id': 'x' }, /Last-Event-ID: must be the id of an event/],
    ['', { ...events, 'last-event-id': '' }, /Last-Event-ID/],
    ['', { ...events, 'last-event-id': '01' }, /Last-Event-ID/],
    ['', { ...events, 'last-event-id': '1000000000000000' }, /Last-Event-ID/],
    ['', { 'last-event-id': 'x' }, null],
  ];
  for (const [query, headers, says] of rows) {
    for (const [one, status] of [
      [id, 200],
      ['dpl_unknown', 404],
    ] as const) {
      const response = await getLog(http, one, key, query, headers);
      t.equal(response.status, says === null ? status : 400, `${query} ${JSON.stringify(headers)}`);
      if (says !== null) t.match(await response.text(), says);
      else await response.text();
    }
  }
  await until(() => http.watches.size() === 0);
});

t.test('an answer breaks off if the log cannot be read, and the cause is logged', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'printed\n');
  http.store.execute('ALTER TABLE log_chunks RENAME TO lost');
  const lines = (text: string) => http.log.filter(({ msg }) => msg === text);
  for (const accept of ['text/plain', 'text/event-stream']) {
    http.log.length = 0;
    await t.rejects(
      getLog(http, id, key, '', { accept }).then((response) => response.text()),
      accept,
    );
    await until(() => lines('request').length === 1);
    t.match(lines('a response broke off'), [
      {
        level: 50,
        request_id: lines('request')[0]?.['request_id'],
        route: '/v2/deployments/{deployment_id}/logs',
        err: { message: /no such table/, stack: /\n +at / },
      },
    ]);
  }
  await until(() => http.watches.size() === 0);
});

t.test('a client that leaves before the end of a log is logged as 499, not as an error', async (t) => {
  const { http, id, key } = await running(t);
  const client = await connectRaw(http.port);
  client.send(follow(id, key));
  await client.received('retry: ');
  client.socket.resetAndDestroy();
  await until(() => http.log.some(({ msg }) => msg === 'request'));
  const lines = http.log.filter(({ msg }) => msg === 'request' || msg === 'a response broke off');
  t.strictSame(
    lines.map(({ msg, status }) => [msg, status]),
    [['request', 499]],
  );
});

t.test('an event stream ends once its client has ended its side', async (t) => {
  const { http, id, key } = await running(t);
  const client = await connectRaw(http.port);
  client.send(follow(id, key));
  await client.received('retry: ');
  t.equal(http.watches.size(), 1);
  client.socket.end();
  t.match(await client.closed, /retry: .*\r\n0\r\n\r\n$/s);
  t.equal(http.watches.size(), 0);
});

t.test('a client that has ended its side gets all that there is of a log', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'a line\n'.repeat(100_000));
  const soFar = await connectRaw(http.port);
  soFar.socket.end(follow(id, key));
  t.match(await soFar.closed, /id: 700000\n.*\r\n0\r\n\r\n$/s);
  await finish(http.store, id);
  const ended = await connectRaw(http.port);
  ended.socket.end(follow(id, key));
  t.match(await ended.closed, /id: 700000\nevent: end\n.*\r\n0\r\n\r\n$/s);
  t.equal(http.watches.size(), 0);
});

function follow(id: DeploymentId, key: string): string {
  return `GET /v2/deployments/${id}/logs HTTP/1.1\r\nHost: d\r\nAuthorization: Bearer ${key}\r\nAccept: text/event-stream\r\n\r\n`;
}

t.test('a log needs the scope logs:read and a project that the key sees', async (t) => {
  const { http, id } = await running(t);
  await print(http.store, id, 'secret\n');
  const { secret: withoutScope } = await http.store.key({ scopes: ['deployments:read'] });
  const { secret: withoutProject } = await http.store.key({ allProjects: false });
  for (const accept of ['text/plain', 'text/event-stream']) {
    const refused = await getLog(http, id, withoutScope, '', { accept });
    t.equal(refused.status, 403);
    t.match(await refused.text(), /logs:read/);
    const refusal = (one: string) =>
      requestJson(http.port, 'GET', `/v2/deployments/${one}/logs`, {
        key: withoutProject,
        headers: { accept },
      });
    const unseen = await refusal(id);
    t.match(unseen, { status: 404, body: { error: { code: 'not_found' } } });
    t.equal(toldBy(unseen), toldBy(await refusal('dpl_unknown')));
  }
  await until(() => http.watches.size() === 0);
});

t.test('a log is sent as events if Accept prefers text/event-stream, else as text', async (t) => {
  const { http, id, key } = await running(t);
  await finish(http.store, id);
  const rows: [accept: string | undefined, type: string][] = [
    [undefined, 'text/plain; charset=utf-8'],
    ['*/*', 'text/plain; charset=utf-8'],
    ['text/plain', 'text/plain; charset=utf-8'],
    ['application/json', 'text/plain; charset=utf-8'],
    ['text/event-streams', 'text/plain; charset=utf-8'],
    ['x-text/event-stream', 'text/plain; charset=utf-8'],
    ['text/event-stream', 'text/event-stream; charset=utf-8'],
    ['TEXT/Event-Stream;q=0.9', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0.001', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0', 'text/plain; charset=utf-8'],
    ['text/event-stream; Q=0.000, text/plain', 'text/plain; charset=utf-8'],
    ['text/html, text/event-stream', 'text/event-stream; charset=utf-8'],
    ['text/event-stream, */*', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0.1, */*', 'text/plain; charset=utf-8'],
    ['text/event-stream;q=0.999, text/*', 'text/plain; charset=utf-8'],
    ['*/*, text/*;q=0.5, text/event-stream;q=0.5', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0.5, text/plain;q=0.1, */*', 'text/event-stream; charset=utf-8'],
    ['text/event-stream;q=0, */*;q=0', 'text/plain; charset=utf-8'],
    [`text/event-stream${','.repeat(1_024)}text/plain`, 'text/event-stream; charset=utf-8'],
    [`text/event-stream;q=0.5,${'x'.repeat(994)},*/*;q=0.1`, 'text/event-stream; charset=utf-8'], // cut at its q
    ['text/plain, text/event-stream', 'text/plain; charset=utf-8'],
    ['text/event-stream,text/plain,application/json', 'text/plain; charset=utf-8'],
    ['text/plain;q=0.4, text/event-stream;q=0.5', 'text/event-stream; charset=utf-8'],
    ['text/plain, text/event-stream;q=0.5', 'text/plain; charset=utf-8'],
    ['text/event-stream;q=much', 'text/plain; charset=utf-8'],
  ];
  for (const [accept, type] of rows) {
    const asked = httpRequest({
      port: http.port,
      path: `/v2/deployments/${id}/logs`,
      headers: { authorization: `Bearer ${key}`, ...(accept === undefined ? {} : { accept }) },
    }).end();
    const [response] = await once(asked, 'response');
    response.resume();
    t.equal(response.headers['content-type'], type, accept ?? 'none');
  }
});

t.test('HEAD answers Log-Next-Offset without a body, and follows nothing', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'hello\n');
  for (const accept of ['text/plain', 'text/event-stream']) {
    const response = await fetch(`http://127.0.0.1:${http.port}/v2/deployments/${id}/logs`, {
      method: 'HEAD',
      headers: { authorization: `Bearer ${key}`, accept },
    });
    t.equal(response.status, 200);
    t.equal(await response.text(), '');
    if (accept === 'text/plain') t.equal(response.headers.get('log-next-offset'), '6');
  }
  await until(() => http.watches.size() === 0);
});

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

t.test('a log is read and followed without all of its deployment', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, 'hello\n');
  let reads = 0;
  for (const read of ['get', 'visibleTo'] as const) {
    http.store.reads.deployments[read] = () => {
      reads += 1;
      return undefined;
    };
  }
  t.equal(await textAt(http, id, key, ''), 'hello\n');
  const stream = await openEvents(t, http.port, `/v2/deployments/${id}/logs`, key);
  t.match(await stream.next(), { data: 'hello\n' });
  await finish(http.store, id);
  t.match(await stream.rest(), [{ type: 'end' }]);
  t.equal(reads, 0);
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
    if (second < 10)
      await writer.write('deployments.report', { id, status: 'running', message, outputs: null });
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

t.test('a log is not read far ahead of a client that does not take it', async (t) => {
  const { http, id, key } = await running(t);
  const sockets = new Set<Socket>();
  http.server.listener.on('connection', (socket) => sockets.add(socket));
  let readAhead = () => 0;
  http.server.ext('onPreResponse', ({ response }, h) => {
    const source = 'isBoom' in response ? undefined : response.source;
    readAhead = () => (source instanceof Readable ? source.readableLength : Number.NaN);
    return h.continue;
  });
  const total = 48 * 1024 * 1024;
  await print(http.store, id, Buffer.alloc(total, 'ä\n'));
  for (const accept of ['text/plain', 'text/event-stream']) {
    sockets.clear();
    const client = await connectRaw(http.port);
    client.socket.pause();
    client.send(
      `GET /v2/deployments/${id}/logs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${key}\r\nAccept: ${accept}\r\n\r\n`,
    );
    await until(() => sockets.size === 1);
    const [socket] = sockets;
    if (socket === undefined) throw new Error('nobody connected');
    // Until the kernel's buffers are full: what is written then stays in this process.
    await until(() => socket.writableNeedDrain);
    let before = -1;
    while (before !== socket.bytesWritten) {
      before = socket.bytesWritten;
      for (let turn = 0; turn < 200; turn++) await nextTurn();
    }
    t.ok(socket.bytesWritten < total / 2, 'less than half of the log was read');
    t.ok(socket.writableLength < 256 * 1024, `${accept}: ${socket.writableLength} bytes wait in memory`);
    t.ok(readAhead() < 64 * 1024, `${accept}: ${readAhead()} bytes are read ahead`);
    client.socket.destroy();
  }
  await until(() => http.watches.size() === 0);
});

t.test('a client that takes a long log as fast as it comes leaves turns to others', async (t) => {
  const { http, id, key } = await running(t);
  await print(http.store, id, Buffer.alloc(2 * 1024 * 1024, 'x'));
  await finish(http.store, id);
  const sockets: Socket[] = [];
  http.server.listener.on('connection', (socket) => sockets.push(socket));
  const written = () => sockets.reduce((sum, { bytesWritten }) => sum + bytesWritten, 0);
  for (const accept of ['text/plain', 'text/event-stream']) {
    let isOver = false;
    const answer = getLog(http, id, key, '', { accept })
      .then((response) => response.text())
      .finally(() => {
        isOver = true;
      });
    let most = 0;
    while (!isOver) {
      const before = written();
      await nextTurn();
      most = Math.max(most, written() - before);
    }
    t.ok((await answer).length >= 2 * 1024 * 1024);
    t.ok(most < 64 * 1024, `${accept}: at most ${most} bytes in a turn`);
  }
  await until(() => http.watches.size() === 0);
});

interface Running {
  http: DeploymentsHttp;
  id: DeploymentId;
  key: string;
  keyId: KeyId;
}

/** A deployment with the status running, but no process: the test writes its log. */
async function running(t: Test, effects = realEffects, store = testStore(t, effects)): Promise<Running> {
  const http = await startDeploymentsHttp(t, { effects, store });
  const { secret: key, keyId } = await store.key();
  const { id } = await store.writer.write('deployments.create', newDeployment(await store.project()));
  await store.writer.write('deployments.claim', undefined);
  return { http, id, key, keyId };
}

async function print(store: TestStore, id: DeploymentId, text: string | Buffer): Promise<void> {
  const bytes = Buffer.from(text);
  const start = store.reads.deployments.existing(id).log_bytes;
  await append(store, id, start, bytes, start + bytes.length);
}

async function append(
  store: TestStore,
  id: DeploymentId,
  start: number,
  bytes: Buffer,
  logBytes: number,
): Promise<void> {
  const chunks = [];
  for (let at = 0; at < bytes.length; at += 65_536) {
    chunks.push({ start: start + at, bytes: bytes.subarray(at, at + 65_536) });
  }
  await store.writer.write('logs.append', {
    id,
    chunks,
    logBytes,
    dropTailBefore: null,
    headBytes: 0,
  });
}

async function finish(store: TestStore, id: DeploymentId): Promise<void> {
  await store.writer.write('deployments.finish', endOf(id));
}

function getLog(
  { port }: DeploymentsHttp,
  id: string,
  key: string,
  query: string,
  headers: Record<string, string> = {},
): Promise<Response> {
  return fetch(`http://127.0.0.1:${port}/v2/deployments/${id}/logs${query}`, {
    headers: { authorization: `Bearer ${key}`, ...headers },
  });
}

async function textAt(http: DeploymentsHttp, id: string, key: string, query: string): Promise<string> {
  return await (await getLog(http, id, key, query)).text();
}

async function all<Item>(items: AsyncIterable<Item>): Promise<Item[]> {
  const list: Item[] = [];
  for await (const item of items) list.push(item);
  return list;
}
