import { randomBytes } from 'node:crypto';
import t from 'tap';
import type { Page } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import type { OpenApiDocument, Parameter } from '../../src/http/openapi-types.ts';
import { createPages, type Walk } from '../../src/http/pages.ts';
import { inTurn, TURN_MAX_MS } from '../../src/turns.ts';
import { newDeployment } from '../helpers/store.ts';
import { startWholeService } from '../helpers/whole-service.ts';

const SECRET = randomBytes(32);
const WALK: Walk = { list: 'deployments', filters: { ref: 'main', statuses: ['failed'] }, keyId: 'key_a' };

t.test('a cursor leads back to where its page ended', async (t) => {
  const pages = createPages(SECRET, realEffects);
  for (const seq of [0, 1, 255, 2 ** 40, Number.MAX_SAFE_INTEGER]) {
    const { next_cursor: cursor } = pages.page(WALK, { items: [], goOnAt: seq });
    t.equal(pages.position(WALK, cursor ?? undefined, -1), seq);
  }
  t.equal(pages.position(WALK, undefined, 7), 7, 'without a cursor a list begins at its start');
});

t.test('the last page has no cursor', async (t) => {
  const pages = createPages(SECRET, realEffects);
  t.strictSame(pages.page(WALK, { items: ['a'], goOnAt: null }), { data: ['a'], next_cursor: null });
});

t.test('a cursor is valid for its list, filters, key and file alone, also after a restart', async (t) => {
  const cursor = createPages(SECRET, realEffects).page(WALK, { items: [], goOnAt: 42 }).next_cursor ?? '';
  const pages = createPages(SECRET, realEffects);
  t.equal(pages.position(WALK, cursor, 0), 42);
  t.equal(
    pages.position({ ...WALK, filters: { statuses: ['failed'], ref: 'main' } }, cursor, 0),
    42,
    'in whatever order the filters come',
  );
  const others: [string, Walk][] = [
    ['another list', { ...WALK, list: 'projects' }],
    ['another key', { ...WALK, keyId: 'key_b' }],
    ['another value', { ...WALK, filters: { ...WALK.filters, ref: 'v1' } }],
    ['one filter more', { ...WALK, filters: { ...WALK.filters, projectId: 'prj_a' } }],
    ['one filter less', { ...WALK, filters: { ref: 'main' } }],
  ];
  for (const [name, walk] of others) t.throws(() => pages.position(walk, cursor, 0), REFUSAL, name);
  t.throws(
    () => createPages(randomBytes(32), realEffects).position(WALK, cursor, 0),
    REFUSAL,
    'another file',
  );
});

t.test('a cursor that was altered, cut or made up is rejected', async (t) => {
  const pages = createPages(SECRET, realEffects);
  const cursor = pages.page(WALK, { items: [], goOnAt: 42 }).next_cursor ?? '';
  const altered = Array.from(cursor, (letter, index) => {
    const other = letter === 'A' ? 'B' : 'A';
    return cursor.slice(0, index) + other + cursor.slice(index + 1);
  });
  const made = [
    '',
    'x',
    '42',
    cursor.slice(1),
    cursor.slice(0, -1),
    `${cursor}=`,
    `${cursor}A`,
    ` ${cursor}`,
    cursor + cursor,
    Buffer.from(cursor, 'base64url').toString('hex'),
    randomBytes(36).toString('base64url'),
    Buffer.alloc(36).toString('base64url'),
  ];
  for (const one of [...altered, ...made]) {
    t.throws(() => pages.position(WALK, one, 0), REFUSAL, one);
  }
});

t.test('a cursor does not reveal its position', async (t) => {
  const pages = createPages(SECRET, realEffects);
  const [first, second] = [1, 1].map((seq) => pages.page(WALK, { items: [], goOnAt: seq }).next_cursor ?? '');
  t.not(first, second, 'the same position looks different each time');
  t.match(first, /^[\w-]{48}$/);
});

const REFUSAL = { code: 'invalid_request', details: [{ in: 'query', field: 'cursor' }] };

t.test('every list binds its cursors to its key and to all of its filters', async (t) => {
  const { url, contract, ...service } = await startWholeService(t);
  const projectId = await service.project({ command: null });
  const { secret, keyId } = await service.key();
  await service.project();
  const ids: Record<string, string> = { project_id: projectId };
  const webhook = { keyId, url: `${url}/`, events: ['deployment.created' as const], description: null };
  for (const _ of [1, 2]) {
    ids['webhook_id'] = (await service.admin.writer.write('webhooks.create', webhook)).id;
  }
  for (const _ of [1, 2]) await service.admin.writer.write('deployments.create', newDeployment(projectId));

  const get = (path: string, key = secret) =>
    fetch(`${url}${path}`, { headers: { Authorization: `Bearer ${key}` } });
  const { secret: otherKey } = await service.key();
  const lists = listsOf(contract.document);
  t.ok(lists.length >= 5);
  for (const { path, parameters } of lists) {
    const begun = `${withIds(path, ids)}?limit=1`;
    const { next_cursor: cursor } = (await (await get(begun)).json()) as Page<unknown>;
    t.type(cursor, 'string', begun);
    t.equal((await get(`${begun}&cursor=${cursor}`)).status, 200, begun);
    t.equal((await get(`${begun}&cursor=${cursor}`, otherKey)).status, 400, `another key on ${path}`);
    for (const parameter of parameters.filter(({ name }) => name !== 'limit' && name !== 'cursor')) {
      const narrowed = `${begun}&${parameter.name}=${encodeURIComponent(valueFor(parameter))}`;
      t.equal((await get(narrowed)).status, 200, narrowed);
      t.equal((await get(`${narrowed}&cursor=${cursor}`)).status, 400, `${parameter.name} of ${path}`);
    }
  }
});

t.test(
  'what takes long to read waits for what its key asked for before, and not for other keys',
  async (t) => {
    const { url, contract, ...service } = await startWholeService(t);
    const projectId = await service.project({ command: null });
    const keys = { busy: await service.key(), other: await service.key() };
    const idsOf = { busy: await idsSeenBy('busy'), other: await idsSeenBy('other') };

    const short = ['/v2/projects', '/v2/webhooks'];
    const long = listsOf(contract.document).filter(({ path }) => !short.includes(path));
    const paths = [...long.map(({ path }) => path), '/v2/deliveries/{delivery_id}'];
    for (const path of paths) {
      let isOver = false;
      const before = Array.from({ length: 1_000 }, () =>
        inTurn(() => {
          if (!isOver) realEffects.block(TURN_MAX_MS);
        }, keys.busy.keyId),
      );
      let isAnswered = false;
      const waiting = get('busy', path).then((answer) => {
        isAnswered = true;
        return answer;
      });
      t.match(await get('other', path), { status: 200 }, path);
      t.equal(isAnswered, false, path);
      isOver = true;
      t.match(await waiting, { status: 200 });
      await Promise.all(before);
    }

    /** Each key has a webhook and a delivery of its own. */
    async function idsSeenBy(key: keyof typeof keys): Promise<Record<string, string>> {
      const { keyId } = keys[key];
      const webhook = { keyId, url: `${url}/`, events: ['deployment.created' as const], description: null };
      const { id } = await service.admin.writer.write('webhooks.create', webhook);
      await service.admin.writer.write('deployments.create', newDeployment(projectId));
      const [delivery] = service.query<{ id: string }>('SELECT id FROM deliveries WHERE webhook_id = ?', id);
      return { project_id: projectId, webhook_id: id, delivery_id: delivery?.id ?? '' };
    }

    async function get(key: keyof typeof keys, path: string): Promise<Response> {
      const headers = { Authorization: `Bearer ${keys[key].secret}` };
      return await fetch(`${url}${withIds(path, idsOf[key])}`, { headers });
    }
  },
);

function listsOf({ paths }: OpenApiDocument): { path: string; parameters: Parameter[] }[] {
  return Object.entries(paths).flatMap(([path, { get: operation }]) => {
    const parameters = operation?.parameters?.filter((one) => one.in === 'query') ?? [];
    return parameters.some(({ name }) => name === 'cursor') ? [{ path, parameters }] : [];
  });
}

function withIds(path: string, ids: Readonly<Record<string, string>>): string {
  return path.replace(/\{(\w+)\}/, (_, name: string) => ids[name] ?? '');
}

/** One that it may have. */
function valueFor({ schema, example }: Parameter): string {
  const { enum: values, examples } = schema.items ?? schema;
  return String(example ?? values?.[0] ?? examples?.[0]);
}
