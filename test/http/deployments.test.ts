import { renameSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import t, { type Test } from 'tap';
import {
  type Deployment,
  type DeploymentId,
  type KeyId,
  type Page,
  type ProjectId,
  SCOPES,
  type Scope,
} from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { TURN_MAX_MS } from '../../src/turns.ts';
import { fixture, marked, until } from '../helpers/commands.ts';
import {
  type DeploymentsHttp,
  startDeploymentsHttp,
  startExecutor,
  untilStatus,
} from '../helpers/deploying.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { connectRaw, type JsonResponse, parseResponses, requestJson, toldBy } from '../helpers/http.ts';
import { pruneAll } from '../helpers/retention.ts';
import { newDeployment, ref, reportFor, type TestStore, testStore } from '../helpers/store.ts';

t.test('each deployment route needs its scope, and hides what the key cannot see', async (t) => {
  const { http, projectId, id } = await setUp(t);
  const { secret: blind } = await http.store.key({ allProjects: false });
  const routes: [method: string, path: string, unknown: string, scope: Scope, body: unknown][] = [
    [
      'POST',
      `/v2/projects/${projectId}/deployments`,
      '/v2/projects/prj_none/deployments',
      'deployments:write',
      { ref: 'main' },
    ],
    [
      'GET',
      `/v2/projects/${projectId}/deployments`,
      '/v2/projects/prj_none/deployments',
      'deployments:read',
      undefined,
    ],
    ['GET', `/v2/deployments/${id}`, '/v2/deployments/dpl_none', 'deployments:read', undefined],
    ['GET', `/v2/deployments/${id}?wait=60`, '/v2/deployments/dpl_none', 'deployments:read', undefined],
    [
      'POST',
      `/v2/deployments/${id}/cancel`,
      '/v2/deployments/dpl_none/cancel',
      'deployments:write',
      undefined,
    ],
    [
      'POST',
      `/v2/deployments/${id}/redeploy`,
      '/v2/deployments/dpl_none/redeploy',
      'deployments:write',
      undefined,
    ],
    [
      'POST',
      `/v2/deployments/${id}/report`,
      '/v2/deployments/dpl_none/report',
      'deployments:report',
      { status: 'failed' },
    ],
  ];
  const before = stateOf(http.store);
  for (const [method, path, unknownPath, scope, body] of routes) {
    const { secret: others } = await http.store.key({ scopes: SCOPES.filter((one) => one !== scope) });
    const refused = await requestJson(http.port, method, path, { key: others, body });
    t.equal(refused.status, 403, `${method} ${path}`);
    t.match(refused.body, { error: { code: 'forbidden', message: new RegExp(scope) } });

    const unseen = await requestJson(http.port, method, path, { key: blind, body });
    const unknown = await requestJson(http.port, method, unknownPath, { key: blind, body });
    t.equal(unseen.status, 404, `${method} ${path}`);
    t.equal(toldBy(unseen), toldBy(unknown), 'answered like an unknown one');
  }
  t.strictSame(stateOf(http.store), before);
});

t.test('an invalid request is answered 400 with the field and the reason, and changes nothing', async (t) => {
  const { http, key, projectId, id } = await setUp(t);
  const report = `/v2/deployments/${id}/report`;
  const names = (count: number) =>
    Object.fromEntries(Array.from({ length: count }, (_, index) => [`name_${index}`, 'x']));
  const rows: [method: string, path: string, body: unknown, says: RegExp][] = [
    ['GET', `/v2/deployments/${id}?wait=61`, undefined, /wait: must be a whole number from 0 to 60/],
    ['GET', `/v2/deployments/${id}?wait=-1`, undefined, /wait/],
    ['GET', `/v2/deployments/${id}?wait=1.5`, undefined, /wait/],
    ['GET', `/v2/deployments/${id}?wait=1s`, undefined, /wait/],
    ['GET', '/v2/deployments?status=done', undefined, /status: must be one of queued, running/],
    ['GET', '/v2/deployments?status=failed&status=x', undefined, /status/],
    ['GET', '/v2/deployments?ref=..', undefined, /ref: must begin/],
    ['GET', '/v2/deployments?project_id=website', undefined, /project_id: must be an id/],
    ['GET', '/v2/deployments?created_after=yesterday', undefined, /created_after: must be a time/],
    ['GET', '/v2/deployments?created_before=2026-02-30T00:00:00Z', undefined, /created_before/],
    ['GET', '/v2/deployments?limit=0', undefined, /limit/],
    ['GET', '/v2/projects/prj_none/deployments?cursor=x', undefined, /cursor: is not a cursor of this list/],
    ['GET', '/v2/projects/1/deployments?cursor=x', undefined, /cursor: is not a cursor of this list/],
    ['GET', '/v2/deployments?cursor=x', undefined, /cursor: is not a cursor of this list/],
    [
      'GET',
      `/v2/projects/${projectId}/deployments?project_id=website`,
      undefined,
      /project_id: must be an id/,
    ],
    ['POST', `/v2/deployments/${id}/cancel`, { reason: 'x' }, /reason: is not allowed/],
    ['POST', `/v2/deployments/${id}/redeploy`, { ref: 'main' }, /ref: is not allowed/],
    ['POST', `/v2/deployments/${id}/redeploy?ref=main`, undefined, /ref: is not allowed/],
    ['POST', report, undefined, /required/],
    ['POST', report, {}, /status: required/],
    ['POST', report, { status: 'queued' }, /status: must be one of running, succeeded, failed/],
    ['POST', report, { status: 'canceled' }, /status/],
    ['POST', report, { status: null }, /"message":"status: must be one of running, succeeded, failed"/],
    ['POST', report, { status: 'failed', exit_code: 1 }, /exit_code: is not allowed/],
    ['POST', report, { status: 'failed', message: 5 }, /message: must be a string/],
    ['POST', report, { status: 'failed', message: 'x'.repeat(4097) }, /message: must be at most 4096/],
    ['POST', report, { status: 'failed', outputs: [] }, /outputs: must be an object/],
    ['POST', report, { status: 'failed', outputs: null }, /outputs: must be an object/],
    ['POST', report, { status: 'failed', outputs: { url: 5 } }, /outputs.url: must be a string/],
    ['POST', report, { status: 'failed', outputs: { '1st': 'x' } }, /outputs.1st: is not allowed/],
    [
      'POST',
      report,
      { status: 'failed', outputs: { größe: null } },
      /outputs.größe: is not allowed: a name is 1 to 64 letters a-z and A-Z, digits and underscores, no digit first"/,
    ],
    [
      'POST',
      report,
      { status: 'failed', outputs: { ['x'.repeat(65)]: 'x' } },
      /outputs.x+.*: is not allowed/,
    ],
    [
      'POST',
      report,
      { status: 'failed', outputs: { url: 'é'.repeat(2049) } },
      /outputs.url: must be at most 4096 bytes/,
    ],
    ['POST', report, { status: 'failed', outputs: names(101) }, /outputs: must have at most 100/],
  ];
  const before = stateOf(http.store);
  for (const [method, path, body, says] of rows) {
    const response = await requestJson(http.port, method, path, { key, body });
    t.equal(response.status, 400, `${method} ${path} ${JSON.stringify(body)?.slice(0, 100)}`);
    t.match(JSON.stringify(response.body), says);
  }
  t.strictSame(stateOf(http.store), before);
});

t.test('a list is filtered by status, ref, project and time of creation', async (t) => {
  const effects = fakeEffects(Date.parse('2026-11-21T08:00:00.000Z'));
  const { http, key, projectId, id: first } = await setUp(t, { effects });
  const other = await http.store.project({ name: 'other' });
  effects.advance(1_000);
  const second = await create(http.store, projectId, { ref: ref('v1') });
  await http.store.writer.write('deployments.cancel', { id: second });
  effects.advance(1_000);
  const third = await create(http.store, other);
  await http.store.writer.write('deployments.report', reportFor(first));
  const rows: [query: string, ids: DeploymentId[]][] = [
    ['', [third, second, first]],
    ['?status=queued', [third]],
    ['?status=running&status=canceled', [second, first]],
    ['?status=canceled&status=canceled', [second]],
    ['?status=succeeded', []],
    ['?ref=main', [third, first]],
    ['?ref=v1', [second]],
    ['?ref=v2', []],
    [`?project_id=${projectId}`, [second, first]],
    [`?project_id=${other}&ref=v1`, []],
    ['?created_after=2026-11-21T08:00:00Z', [third, second]],
    ['?created_after=2026-11-21T10:00:00.999%2B02:00', [third, second]],
    ['?created_before=2026-11-21T08:00:02.000Z', [second, first]],
    ['?created_before=2026-11-21T08:00:02.0005Z', [third, second, first]],
    ['?created_after=2026-11-21T08:00:00.0005Z', [third, second]],
    ['?created_after=2026-11-21T08:00:00Z&created_before=2026-11-21T08:00:02Z', [second]],
    ['?limit=2', [third, second]],
  ];
  for (const [query, ids] of rows)
    t.strictSame(idsOf(await get(http, key, `/v2/deployments${query}`)), ids, query);
  const path = `/v2/projects/${projectId}/deployments`;
  t.strictSame(idsOf(await get(http, key, path)), [second, first]);
  t.strictSame(idsOf(await get(http, key, `${path}?status=running`)), [first]);
  t.strictSame(idsOf(await get(http, key, `${path}?project_id=${projectId}`)), [second, first]);
  t.strictSame(idsOf(await get(http, key, `${path}?project_id=${other}`)), []);
  const { body } = await get(http, key, `/v2/deployments/${third}`);
  t.strictSame((await get(http, key, `/v2/deployments?project_id=${other}`)).body, {
    data: [body],
    next_cursor: null,
  });
});

t.test('a list has only deployments of projects that its key sees', async (t) => {
  const { http, projectId: visible, id } = await setUp(t);
  const ofVisible = `/v2/projects/${visible}/deployments`;
  const hidden = await http.store.project({ name: 'hidden' });
  await create(http.store, hidden);
  const { secret: key } = await http.store.key({ allProjects: false, projectIds: [visible] });
  t.strictSame(idsOf(await get(http, key, '/v2/deployments')), [id]);
  const empty = { data: [], next_cursor: null };
  for (const projectId of [hidden, 'prj_none']) {
    t.strictSame((await get(http, key, `/v2/deployments?project_id=${projectId}`)).body, empty);
    t.equal((await get(http, key, `/v2/projects/${projectId}/deployments`)).status, 404);
    t.strictSame((await get(http, key, `${ofVisible}?project_id=${projectId}`)).body, empty);
    const fromHidden = `/v2/projects/${projectId}/deployments?project_id=${visible}`;
    t.equal((await get(http, key, fromHidden)).status, 404);
  }
});

t.test('paging yields each deployment exactly once while new ones are created', async (t) => {
  const { http, key, projectId } = await setUp(t);
  for (let made = 0; made < 24; made++) await create(http.store, projectId);
  const expected = http.store.query<{ id: string }>('SELECT id FROM deployments ORDER BY seq DESC');
  const walked: string[] = [];
  let cursor: string | null = '';
  while (cursor !== null) {
    const page: Page<Deployment> = await pageOf(http, key, `/v2/deployments?limit=7${cursor}`);
    walked.push(...page.data.map(({ id }) => id));
    await create(http.store, projectId);
    cursor = page.next_cursor === null ? null : `&cursor=${page.next_cursor}`;
  }
  t.strictSame(
    walked,
    expected.map(({ id }) => id),
  );
});

t.test('a cursor is valid only for its list and its filters, in whatever order they come', async (t) => {
  const { http, key, projectId } = await setUp(t);
  const second = await create(http.store, projectId);
  await create(http.store, projectId);
  const path = '/v2/deployments?limit=1&status=queued&status=running';
  const { next_cursor: cursor } = await pageOf(http, key, path);
  const on = `&cursor=${cursor}`;
  const inProject = `/v2/projects/${projectId}/deployments?limit=1`;
  const ofProject = `/v2/deployments?limit=1&project_id=${projectId}`;
  const onInProject = `&cursor=${(await pageOf(http, key, inProject)).next_cursor}`;
  const onOfProject = `&cursor=${(await pageOf(http, key, ofProject)).next_cursor}`;
  const rows: [path: string, ids: DeploymentId[] | 400][] = [
    [`${path}${on}`, [second]],
    [`/v2/deployments?status=running&status=queued&limit=1${on}`, [second]],
    [`/v2/deployments?limit=1&status=queued${on}`, 400],
    [`/v2/deployments?limit=1${on}`, 400],
    [`${inProject}${onInProject}`, [second]],
    [`${ofProject}${onOfProject}`, [second]],
    [`${ofProject}${onInProject}`, 400],
    [`${inProject}${onOfProject}`, 400],
    [`${inProject}&project_id=${projectId}${onInProject}`, [second]],
    [`${inProject}&project_id=prj_none${onInProject}`, 400],
  ];
  for (const [path, ids] of rows) {
    const response = await get(http, key, path);
    if (ids === 400) t.equal(response.status, 400, path);
    else t.strictSame(idsOf(response), ids, path);
  }
});

t.test('GET with ?wait is answered once the deployment has ended', async (t) => {
  const { http, key, id } = await setUp(t);
  const waiting = get(http, key, `/v2/deployments/${id}?wait=60`);
  await until(() => http.watches.size() === 1);
  await report(http.store, id, 'running');
  t.equal(http.watches.size(), 1, 'a start does not end the wait');
  await report(http.store, id, 'succeeded');
  const { status, body } = await waiting;
  t.equal(status, 200);
  t.match(body, { id, status: 'succeeded' });
  await until(() => http.watches.size() === 0);
  t.match(
    (await get(http, key, `/v2/deployments/${id}?wait=60`)).body,
    { status: 'succeeded' },
    'answered at once',
  );
});

t.test('GET with ?wait is answered with the current state when its time is over', async (t) => {
  const effects = fakeEffects();
  const { http, key, id } = await setUp(t, { effects });
  t.match((await get(http, key, `/v2/deployments/${id}?wait=0`)).body, { status: 'queued' });
  const waiting = get(http, key, `/v2/deployments/${id}?wait=5`);
  await until(() => http.watches.size() === 1);
  effects.advance(4_999);
  t.equal(http.watches.size(), 1);
  effects.advance(1);
  t.match((await waiting).body, { status: 'queued' });
  await until(() => http.watches.size() === 0);
});

t.test('GET with ?wait does not miss an end between its first read and the wait', async (t) => {
  const { http, key, id } = await setUp(t);
  const { open } = http.watches;
  // Remembered as queued; between them it is recorded that the key was used.
  for (let read = 0; read < 2; read++) await get(http, key, `/v2/deployments/${id}`);
  // The latest moment at which no watch is open yet: the request has read the deployment as queued.
  http.watches.open = (...request) => {
    http.store.execute(`
      UPDATE deployments SET status = 'failed', reason = 'reported', finished_at = created_at WHERE id = '${id}'`);
    return open(...request);
  };
  t.match((await get(http, key, `/v2/deployments/${id}?wait=60`)).body, { status: 'failed' });
});

t.test(
  'requests with ?wait share what they read, and no more than its progress before the answer',
  async (t) => {
    const { http, key, id } = await setUp(t);
    const { deployments } = http.store.reads;
    const { progressVisibleTo, visibleTo } = deployments;
    let read: string[] = [];
    deployments.progressVisibleTo = (...request) => {
      read.push('progress');
      return progressVisibleTo(...request);
    };
    deployments.visibleTo = (...request) => {
      read.push('all');
      return visibleTo(...request);
    };
    const waiting = Array.from({ length: 20 }, () => get(http, key, `/v2/deployments/${id}?wait=60`));
    await until(() => http.watches.size() === 20);
    t.notOk(read.includes('all'));

    read = [];
    await report(http.store, id, 'running');
    await nextTurn();
    t.strictSame(read, ['progress']);
    await report(http.store, id, 'succeeded');
    for (const { body } of await Promise.all(waiting)) t.match(body, { id, status: 'succeeded' });
    t.equal(read.filter((what) => what === 'all').length, 1);
  },
);

t.test(
  'deployments that take long to read, as those far back in a queue do, leave turns to others',
  async (t) => {
    const { http, key, projectId } = await setUp(t);
    const { deployments } = http.store.reads;
    const { visibleTo } = deployments;
    let turn = 0;
    const readIn: number[] = [];
    deployments.visibleTo = (...request) => {
      readIn.push(turn);
      realEffects.block(TURN_MAX_MS);
      return visibleTo(...request);
    };
    const ids = await Promise.all(Array.from({ length: 10 }, () => create(http.store, projectId)));
    const waiting = ids.map((id) => get(http, key, `/v2/deployments/${id}?wait=60`));
    await until(() => http.watches.size() === ids.length);
    http.watches.close();
    while (readIn.length < ids.length) {
      await nextTurn();
      turn += 1;
    }
    t.equal(new Set(readIn).size, ids.length);
    for (const { status } of await Promise.all(waiting)) t.equal(status, 200);
  },
);

t.test(
  'GET with ?wait ends when its client leaves or ends its side, and when the service stops',
  async (t) => {
    const { http, key, id } = await setUp(t);
    const client = await connectRaw(http.port);
    const wait = `GET /v2/deployments/${id}?wait=60 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${key}\r\n\r\n`;
    client.send(wait);
    await until(() => http.watches.size() === 1);
    client.socket.destroy();
    await until(() => http.watches.size() === 0);
    const halfClosed = await connectRaw(http.port);
    halfClosed.send(wait.repeat(2));
    await until(() => http.watches.size() === 2);
    halfClosed.socket.end(wait);
    const answers = parseResponses(await halfClosed.closed);
    t.match(
      answers.map(({ status, body }) => [status, JSON.parse(body)]),
      Array(3).fill([200, { status: 'queued' }]),
    );
    t.equal(http.watches.size(), 0);

    const waiting = get(http, key, `/v2/deployments/${id}?wait=60`);
    await until(() => http.watches.size() === 1);
    await http.server.stop({ timeout: 10_000 });
    t.match((await waiting).body, { status: 'queued' });
    await until(() => http.watches.size() === 0);
  },
);

t.test('GET with ?wait is answered 401, not with the result, if its key was revoked', async (t) => {
  const { http, key, keyId, id } = await setUp(t);
  const waiting = get(http, key, `/v2/deployments/${id}?wait=60`);
  await until(() => http.watches.size() === 1);
  await http.store.writer.write('keys.revoke', { id: keyId });
  await report(http.store, id, 'succeeded');
  const { status, headers, body } = await waiting;
  t.equal(status, 401);
  t.equal(headers.get('www-authenticate'), 'Bearer');
  t.match(body, { error: { code: 'unauthorized' } });
  await until(() => http.watches.size() === 0);
});

t.test('and so it is if its key has expired', async (t) => {
  const effects = fakeEffects();
  const { http, id } = await setUp(t, { effects });
  const { secret } = await http.store.key({ expiresInMs: 30_000 });
  const waiting = get(http, secret, `/v2/deployments/${id}?wait=60`);
  await until(() => http.watches.size() === 1);
  effects.advance(30_000);
  await report(http.store, id, 'succeeded');
  t.equal((await waiting).status, 401);
});

t.test('500 requests of a key may wait and 1,000 of all keys: then 429 and 503', async (t) => {
  const { http, key, keyId, id } = await setUp(t);
  const { secret: otherKey } = await http.store.key();
  const held = Array.from({ length: 500 }, () => http.watches.open([id], keyId));
  const refused = await get(http, key, `/v2/deployments/${id}?wait=60`);
  t.equal(refused.status, 429);
  t.equal(refused.headers.get('retry-after'), '5');
  t.equal((await get(http, key, `/v2/deployments/${id}`)).status, 200, 'a request without ?wait is answered');
  const waiting = get(http, otherKey, `/v2/deployments/${id}?wait=60`);
  await until(() => http.watches.size() === 501);
  const more = Array.from({ length: 499 }, (_, index) => http.watches.open([id], `key_${index}` as KeyId));
  const overloaded = await get(http, otherKey, `/v2/deployments/${id}?wait=60`);
  t.equal(overloaded.status, 503);
  for (const watch of [...held, ...more]) watch.close();
  await report(http.store, id, 'succeeded');
  t.match((await waiting).body, { status: 'succeeded' });
  await until(() => http.watches.size() === 0);
});

t.test('a queued deployment is canceled at once, a running one once its command has ended', async (t) => {
  const store = testStore(t, realEffects);
  const http = await startDeploymentsHttp(t, { store });
  await startExecutor(t, store, { killGraceMs: 200 });
  const { secret: key } = await store.key();
  const projectId = await store.project({ command: [fixture('ignores-sigterm')] });
  const started = await post(http, key, `/v2/projects/${projectId}/deployments`, { ref: 'main' });
  t.equal(started.status, 201);
  const { id } = started.body as Deployment;
  t.equal(started.headers.get('location'), `/v2/deployments/${id}`);
  await untilStatus(store, id, 'running');
  const queued = await create(store, projectId);

  const first = await post(http, key, `/v2/deployments/${queued}/cancel`);
  t.equal(first.status, 202);
  t.match(first.body, { id: queued, status: 'canceled', reason: 'user' });
  await until(() => (store.reads.deployments.get(id)?.log_bytes ?? 0) > 0);
  t.equal((await marked(id)).length > 0, true);
  const second = await post(http, key, `/v2/deployments/${id}/cancel`);
  t.equal(second.status, 202);
  t.match(second.body, { id, status: 'canceling', finished_at: null });

  const end = await get(http, key, `/v2/deployments/${id}?wait=60`);
  t.match(end.body, { status: 'canceled', reason: 'user' });
  t.strictSame(await marked(id), []);
  for (const one of [id, queued]) {
    const before = stateOf(store);
    const refused = await post(http, key, `/v2/deployments/${one}/cancel`);
    t.equal(refused.status, 409);
    t.match(refused.body, { error: { code: 'conflict', message: /was canceled/ } });
    t.strictSame(stateOf(store), before);
  }
});

t.test('a repeated cancellation is replayed, also after the deployment has ended', async (t) => {
  const { http, key, projectId } = await setUp(t);
  const id = await create(http.store, projectId);
  await report(http.store, id, 'running');
  const headers = { 'idempotency-key': 'once' };
  const first = await requestJson(http.port, 'POST', `/v2/deployments/${id}/cancel`, { key, headers });
  t.equal(first.status, 202);
  await report(http.store, id, 'failed');
  const before = stateOf(http.store);
  const again = await requestJson(http.port, 'POST', `/v2/deployments/${id}/cancel`, { key, headers });
  t.equal(again.status, 202);
  t.equal(again.headers.get('idempotent-replayed'), 'true');
  t.strictSame(again.body, first.body);
  const other = await requestJson(http.port, 'POST', `/v2/deployments/${id}/redeploy`, { key, headers });
  t.equal(other.status, 422);
  t.strictSame(stateOf(http.store), before);
});

t.test('after its deployment was pruned, a write is still replayed, to its key alone', async (t) => {
  const effects = fakeEffects();
  const { http, key, projectId, id } = await setUp(t, { effects });
  const requests: [path: string, idempotencyKey: string, body: unknown][] = [
    [`/v2/projects/${projectId}/deployments`, 'make', { ref: 'v1' }],
    [`/v2/deployments/${id}/redeploy`, 'again', undefined],
    [`/v2/deployments/${id}/report`, 'begin', { status: 'running' }],
    [`/v2/deployments/${id}/cancel`, 'stop', undefined],
  ];
  const send = ([path, idempotencyKey, body]: (typeof requests)[number]) =>
    requestJson(http.port, 'POST', path, { key, headers: { 'idempotency-key': idempotencyKey }, body });
  const first = [];
  for (const request of requests) first.push(await send(request));
  await report(http.store, id, 'failed');
  await report(http.store, ((first[0] as JsonResponse).body as Deployment).id, 'failed');
  effects.advance(1_000);
  await pruneAll(http.store, 500);
  t.equal((await get(http, key, `/v2/deployments/${id}`)).status, 404);

  const before = stateOf(http.store);
  for (const [index, request] of requests.entries()) {
    const again = await send(request);
    t.equal(again.status, first[index]?.status, request[0]);
    t.equal(again.headers.get('idempotent-replayed'), 'true');
    t.strictSame(again.body, first[index]?.body);
  }
  const { secret: other } = await http.store.key();
  const theirs = { key: other, headers: { 'idempotency-key': 'stop' } };
  t.equal((await requestJson(http.port, 'POST', `/v2/deployments/${id}/cancel`, theirs)).status, 404);
  t.equal((await post(http, key, `/v2/deployments/${id}/cancel`)).status, 404);
  t.strictSame(stateOf(http.store), before);
});

t.test('an unknown deployment is 503, not 404, while Idempotency-Keys cannot be looked up', async (t) => {
  const effects = fakeEffects();
  const { http, key } = await setUp(t, { effects });
  const { path } = http.store;
  const cancel = () =>
    requestJson(http.port, 'POST', '/v2/deployments/dpl_none/cancel', {
      key,
      headers: { 'idempotency-key': 'stop' },
    });
  effects.advance(10); // the last check of where the file is holds for so long
  renameSync(path, `${path}.elsewhere`);
  t.match(await cancel(), { status: 503, body: { error: { code: 'unavailable' } } });
  renameSync(`${path}.elsewhere`, path);
  t.equal((await cancel()).status, 404);
});

t.test('an unknown or invisible deployment is 404 even if the Idempotency-Key was used', async (t) => {
  const { http, key, projectId, id } = await setUp(t);
  const { secret: blind } = await http.store.key({ allProjects: false, projectIds: [projectId] });
  const hidden = await create(http.store, await http.store.project({ command: null }));
  const headers = { 'idempotency-key': 'used' };
  const send = (path: string, who: string, body?: unknown) =>
    requestJson(http.port, 'POST', path, { key: who, headers, body });
  for (const who of [key, blind]) {
    t.equal((await send(`/v2/projects/${projectId}/deployments`, who, { ref: 'main' })).status, 201);
  }
  const before = stateOf(http.store);
  const writes: [name: string, body?: unknown][] = [
    ['cancel'],
    ['redeploy'],
    ['report', { status: 'running' }],
  ];
  for (const [name, body] of writes) {
    t.equal((await send(`/v2/deployments/dpl_none/${name}`, key, body)).status, 404, name);
    t.equal((await send(`/v2/deployments/${hidden}/${name}`, blind, body)).status, 404, name);
    t.equal((await send(`/v2/deployments/${id}/${name}`, key, body)).status, 422, 'a visible one is 422');
  }
  t.strictSame(stateOf(http.store), before);
});

t.test('a redeploy runs the same ref once more, once for each Idempotency-Key', async (t) => {
  const store = testStore(t, realEffects);
  const http = await startDeploymentsHttp(t, { store });
  await startExecutor(t, store);
  const { secret: key, keyId } = await store.key({ name: 'night shift' });
  const projectId = await store.project({ command: ['/bin/sh', '-c', 'echo "$DEPLOY_REF"'] });
  const made = await post(http, key, `/v2/projects/${projectId}/deployments`, { ref: 'v1.2.3' });
  const { id } = made.body as Deployment;
  await untilStatus(store, id, 'succeeded');
  const headers = { 'idempotency-key': 'again' };
  const path = `/v2/deployments/${id}/redeploy`;
  const answers = await Promise.all(
    [1, 2, 3].map(() => requestJson(http.port, 'POST', path, { key, headers })),
  );
  const [first] = answers;
  const again = first?.body as Deployment;
  t.strictSame(new Set(answers.map(({ status }) => status)), new Set([201]));
  t.strictSame(new Set(answers.map(({ body }) => (body as Deployment).id)), new Set([again.id]));
  t.equal(first?.headers.get('location'), `/v2/deployments/${again.id}`);
  t.match(again, {
    ref: 'v1.2.3',
    trigger: 'redeploy',
    redeploy_of: id,
    created_by: { key_id: keyId, name: 'night shift' },
  });
  t.match((await get(http, key, `/v2/deployments/${again.id}?wait=60`)).body, { status: 'succeeded' });
  t.match(store.query('SELECT count(*) AS made FROM deployments'), [{ made: 2 }]);
});

t.test('what one key sees is 404 for another, whichever asked first', async (t) => {
  const { http, key, projectId, id } = await setUp(t);
  const { secret: blind } = await http.store.key({ allProjects: false });
  const path = `/v2/projects/${projectId}/deployments`;
  for (const seen of [path, `/v2/deployments/${id}`]) {
    for (const who of [key, blind, key, blind]) {
      t.equal((await get(http, who, seen)).status, who === key ? 200 : 404, seen);
    }
  }
  t.equal((await post(http, blind, path, { ref: 'main' })).status, 404);
});

t.test('a redeploy is 429 while the queue is full and 409 once the project is archived', async (t) => {
  const { http, key } = await setUp(t, { maxQueued: 1 });
  const projectId = await http.store.project();
  const id = await create(http.store, projectId);
  const before = stateOf(http.store);
  for (const full of [
    await post(http, key, `/v2/deployments/${id}/redeploy`),
    await post(http, key, `/v2/projects/${projectId}/deployments`, { ref: 'main' }),
  ]) {
    t.equal(full.status, 429);
    t.equal(full.headers.get('retry-after'), '30');
  }
  t.strictSame(stateOf(http.store), before);
  await http.store.writer.write('projects.archive', { id: projectId });
  const archived = stateOf(http.store);
  t.equal((await post(http, key, `/v2/deployments/${id}/redeploy`)).status, 409);
  t.strictSame(stateOf(http.store), archived);
});

t.test('reports update a deployment until it ends; for a project with a command they are 409', async (t) => {
  const { http, projectId, id } = await setUp(t);
  const { secret: key } = await http.store.key({ scopes: ['deployments:report'] });
  const path = `/v2/deployments/${id}/report`;
  const outputs = { url: 'https://example.com', empty: '', ['x'.repeat(64)]: 'é'.repeat(2048) };
  const rows: [body: unknown, status: number, answer: object][] = [
    [{ status: 'running' }, 200, { status: 'running', message: null }],
    [{ status: 'running', message: 'x'.repeat(4096) }, 200, { message: 'x'.repeat(4096) }],
    [{ status: 'running', message: '' }, 200, { message: 'x'.repeat(4096) }],
    [{ status: 'running', message: null, outputs }, 200, { outputs }],
    [{ status: 'failed', message: 'no space left' }, 200, { status: 'failed', reason: 'reported', outputs }],
    [{ status: 'failed' }, 200, { status: 'failed', message: 'no space left' }],
    [{ status: 'running' }, 409, { error: { code: 'conflict', message: /it failed/ } }],
    [{ status: 'succeeded' }, 409, { error: { code: 'conflict' } }],
  ];
  for (const [body, status, answer] of rows) {
    const response = await post(http, key, path, body);
    t.equal(response.status, status, JSON.stringify(body).slice(0, 80));
    t.match(response.body, answer);
  }
  const ours = await create(http.store, await http.store.project());
  const waiting = await create(http.store, projectId);
  await http.store.writer.write('projects.setStatus', { id: projectId, status: 'paused' });
  const before = stateOf(http.store);
  const start = await post(http, key, `/v2/deployments/${waiting}/report`, { status: 'running' });
  t.equal(start.status, 409);
  t.match(start.body, { error: { code: 'conflict', message: /the project is paused/ } });
  const refused = await post(http, key, `/v2/deployments/${ours}/report`, { status: 'succeeded' });
  t.equal(refused.status, 409);
  t.match(refused.body, { error: { message: /davit itself runs/ } });
  t.strictSame(stateOf(http.store), before);
});

t.test('a report repeated with its Idempotency-Key is replayed', async (t) => {
  const { http, key, id } = await setUp(t);
  const headers = { 'idempotency-key': 'end' };
  const path = `/v2/deployments/${id}/report`;
  const body = { status: 'succeeded', outputs: { a: '1', b: '2' } };
  const first = await requestJson(http.port, 'POST', path, { key, headers, body });
  const again = await requestJson(http.port, 'POST', path, {
    key,
    headers,
    body: { outputs: { b: '2', a: '1' }, status: 'succeeded' },
  });
  t.equal(again.headers.get('idempotent-replayed'), 'true', 'the order of fields does not matter');
  t.strictSame(again.body, first.body);
  for (const other of [{ status: 'failed' }, { status: 'succeeded', outputs: { a: '1', c: '2' } }]) {
    t.equal((await requestJson(http.port, 'POST', path, { key, headers, body: other })).status, 422);
  }
});

interface SetUp {
  http: DeploymentsHttp;
  key: string;
  keyId: KeyId;
  /** It has no command, so that only the test changes its deployments. */
  projectId: ProjectId;
  id: DeploymentId;
}

async function setUp(t: Test, options: Parameters<typeof startDeploymentsHttp>[1] = {}): Promise<SetUp> {
  const http = await startDeploymentsHttp(t, options);
  const { secret: key, keyId } = await http.store.key();
  const projectId = await http.store.project({ command: null });
  return { http, key, keyId, projectId, id: await create(http.store, projectId) };
}

async function create(
  store: TestStore,
  projectId: ProjectId,
  changes: Parameters<typeof newDeployment>[1] = {},
): Promise<DeploymentId> {
  return (await store.writer.write('deployments.create', newDeployment(projectId, changes))).id;
}

async function report(
  store: TestStore,
  id: DeploymentId,
  status: 'running' | 'succeeded' | 'failed',
): Promise<void> {
  await store.writer.write('deployments.report', reportFor(id, { status }));
}

function get({ port }: DeploymentsHttp, key: string, path: string): Promise<JsonResponse> {
  return requestJson(port, 'GET', path, { key });
}

function post({ port }: DeploymentsHttp, key: string, path: string, body?: unknown): Promise<JsonResponse> {
  return requestJson(port, 'POST', path, { key, body });
}

async function pageOf(http: DeploymentsHttp, key: string, path: string): Promise<Page<Deployment>> {
  return (await get(http, key, path)).body as Page<Deployment>;
}

function idsOf({ body }: JsonResponse): DeploymentId[] {
  return (body as Page<Deployment>).data.map(({ id }) => id);
}

/** All but the tables that hold when keys were last used. */
function stateOf(store: TestStore): Record<string, unknown[]> {
  const { keys: _keys, key_secrets: _secrets, ...rest } = store.dump();
  return rest;
}
