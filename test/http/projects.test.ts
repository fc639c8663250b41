import t, { type Test } from 'tap';
import { newId, type Page, type Project, type ProjectId, SCOPES } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { createPages } from '../../src/http/pages.ts';
import { projects } from '../../src/http/projects.ts';
import { type RunningHttp, requestJson, startHttp, toldBy } from '../helpers/http.ts';
import type { TestStore } from '../helpers/store.ts';

t.test('a project is shown with its public fields only, and with its current status', async (t) => {
  const http = await start(t);
  const id = await http.store.project({ name: 'website', directory: '/srv', variables: { TOKEN: 'secret' } });
  const { secret: key } = await http.store.key();
  const shown = { id, name: 'website', created_at: /^\d{4}-.*Z$/, status: 'active' };
  const { status, body } = await requestJson(http.port, 'GET', `/v2/projects/${id}`, { key });
  t.equal(status, 200);
  t.match(body, shown);
  t.strictSame(Object.keys(body as Project), ['id', 'name', 'created_at', 'status']);
  t.strictSame((await requestJson(http.port, 'GET', '/v2/projects', { key })).body, {
    data: [body],
    next_cursor: null,
  });
  for (const status of ['paused', 'archived', 'active'] as const) {
    await http.store.writer.write('projects.setStatus', { id, status });
    t.match((await requestJson(http.port, 'GET', `/v2/projects/${id}`, { key })).body, { status });
  }
});

t.test('a key sees only its projects; the others are answered like unknown ones', async (t) => {
  const http = await start(t);
  const [first, hidden, third] = [
    await http.store.project(),
    await http.store.project(),
    await http.store.project(),
  ];
  const { secret: key } = await http.store.key({ allProjects: false, projectIds: [third, first] });
  const { body } = await requestJson(http.port, 'GET', '/v2/projects', { key });
  t.match(body, { data: [{ id: first }, { id: third }], next_cursor: null });
  const answers = await Promise.all(
    [hidden, 'prj_none', 'website', 'dpl_x', 'prj_'].map((id) =>
      requestJson(http.port, 'GET', `/v2/projects/${id}`, { key }),
    ),
  );
  t.strictSame(new Set(answers.map(({ status }) => status)), new Set([404]));
  t.equal(new Set(answers.map(toldBy)).size, 1);

  const { secret: blind } = await http.store.key({ allProjects: false });
  t.strictSame((await requestJson(http.port, 'GET', '/v2/projects', { key: blind })).body, {
    data: [],
    next_cursor: null,
  });
  const { secret: without } = await http.store.key({
    scopes: SCOPES.filter((one) => one !== 'projects:read'),
  });
  for (const path of ['/v2/projects', `/v2/projects/${first}`]) {
    const refused = await requestJson(http.port, 'GET', path, { key: without });
    t.equal(refused.status, 403);
    t.match(refused.body, { error: { message: /projects:read/ } });
  }
});

t.test('a page that was read before is never shown to another key or for another query', async (t) => {
  const http = await start(t);
  const [first, second] = [await http.store.project(), await http.store.project()];
  const { secret: all } = await http.store.key();
  const { secret: one } = await http.store.key({ allProjects: false, projectIds: [second] });
  const page = async (key: string, query: string) => {
    const { body } = await requestJson(http.port, 'GET', `/v2/projects${query}`, { key });
    const { data, next_cursor: next } = body as Page<Project>;
    return { ids: data.map(({ id }) => id), next };
  };
  for (const key of [all, one]) await page(key, '');
  await http.store.writer.write('instance.probe', undefined); // after it, nothing more is written

  const begun = await page(all, '?limit=1');
  const asked = [
    begun,
    await page(one, '?limit=1'),
    await page(all, `?limit=1&cursor=${begun.next}`),
    await page(all, '?limit=2'),
    await page(all, '?limit=1'),
  ];
  t.strictSame(
    asked.map(({ ids }) => ids),
    [[first], [second], [second], [first, second], [first]],
  );
});

t.test('a page has ?limit items: 50 by default, 200 at most', async (t) => {
  const http = await start(t);
  insert(http.store, 201);
  const { secret: key } = await http.store.key();
  const rows: [query: string, count: number | 400][] = [
    ['', 50],
    ['?limit=1', 1],
    ['?limit=200', 200],
    ['?limit=201', 200],
    ['?limit=99999999999999999999', 200],
    ['?limit=0', 400],
    ['?limit=-1', 400],
    ['?limit=1.5', 400],
    ['?limit=', 400],
    ['?limit=ten', 400],
    ['?limit=1&limit=2', 400],
    ['?cursor=', 400],
    ['?page=2', 400],
  ];
  for (const [query, count] of rows) {
    const { status, body } = await requestJson(http.port, 'GET', `/v2/projects${query}`, { key });
    t.equal(status, count === 400 ? 400 : 200, query);
    if (count === 400) t.match(body, { error: { code: 'invalid_request', details: [{ in: 'query' }] } });
    else {
      const page = body as Page<Project>;
      t.equal(page.data.length, count, query);
      t.type(page.next_cursor, 'string');
    }
  }
});

t.test('paging yields each of 5,000 projects exactly once while others are created', async (t) => {
  const http = await start(t);
  const ids = insert(http.store, 5_000);
  const everyOther = ids.filter((_, index) => index % 2 === 0);
  const all = await http.store.key();
  const some = await http.store.key({ allProjects: false, projectIds: everyOther });
  for (const [key, expected] of [
    [all.secret, ids],
    [some.secret, everyOther],
  ] as const) {
    const walked: string[] = [];
    let cursor: string | null = '';
    while (cursor !== null) {
      const { body } = await requestJson(http.port, 'GET', `/v2/projects?limit=200${cursor}`, { key });
      const { data, next_cursor: next } = body as Page<Project>;
      walked.push(...data.map(({ id }) => id));
      insert(http.store, 3);
      cursor = next === null ? null : `&cursor=${next}`;
    }
    const known = new Set<string>(expected);
    t.strictSame(
      walked.filter((id) => known.has(id)),
      expected,
      'oldest first, each once',
    );
    t.equal(new Set(walked).size, walked.length);
  }
});

async function start(t: Test): Promise<RunningHttp> {
  return await startHttp(t, {
    resources: ({ reads }) => [projects(reads, createPages(reads.instance.cursorSecret(), realEffects))],
  });
}

/** In one transaction, as 5,000 one after the other would take half a minute. */
function insert(store: TestStore, count: number): ProjectId[] {
  const ids = Array.from({ length: count }, () => newId('prj', realEffects));
  const rows = ids.map((id) => `('${id}', 'project', 'active', 0, 'queue')`);
  store.execute(`INSERT INTO projects (id, name, status, created_at, policy) VALUES ${rows.join()}`);
  return ids;
}
