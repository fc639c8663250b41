import { deepEqual } from 'node:assert/strict';
import fc from 'fast-check';
import t from 'tap';
import { DEPLOYMENT_STATUSES, type Deployment, type DeploymentStatus } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { type DeploymentFilter, deploymentPages } from '../../src/store/deployment-pages.ts';
import type { DeploymentRow } from '../../src/store/deployment-rows.ts';
import { deploymentReads } from '../../src/store/deployments.ts';
import type { ListPage } from '../../src/store/list-page.ts';
import { TURN_MAX_MS } from '../../src/turns.ts';
import {
  caller,
  countingRows,
  newDeployment,
  preparedBy,
  type TestStore,
  testStore,
} from '../helpers/store.ts';

const EVERYTHING: DeploymentFilter = {
  projectId: null,
  statuses: null,
  ref: null,
  createdAfterMs: null,
  createdBeforeMs: null,
};

t.test(
  'with any filters, paging yields exactly the deployments that match, each once, newest first',
  async (t) => {
    const store = testStore(t);
    const projectIds = await Promise.all([1, 2, 3, 4].map((number) => store.project({ name: `p${number}` })));
    const restricted = await store.key({ allProjects: false, projectIds: projectIds.slice(0, 2) });
    const blind = await store.key({ allProjects: false, projectIds: [] });
    const callers = [caller(await store.key()), caller(restricted, false), caller(blind, false)];
    const sees = [projectIds, projectIds.slice(0, 2), []];
    const database = store.openReader();

    const row = fc.record({
      project: fc.nat({ max: 2 }), // the last project never has any
      status: fc.constantFrom(...DEPLOYMENT_STATUSES),
      ref: fc.constantFrom('main', 'v1'),
      createdAt: fc.nat({ max: 9 }), // not in the order of seq: clocks jump
      gap: fc.nat({ max: 3 }), // others were pruned
    });
    // Each filter is absent half of the time: with few matches a walk has little to lose.
    const filter = fc.record({
      projectId: fc.option(fc.constantFrom(...projectIds, 'prj_nobodys'), { freq: 2 }),
      statuses: fc.option(fc.subarray([...DEPLOYMENT_STATUSES], { minLength: 1 }), { freq: 2 }),
      ref: fc.option(fc.constantFrom('main', 'v1', 'v2'), { freq: 2 }),
      createdAfterMs: fc.option(fc.nat({ max: 9 }), { freq: 2 }),
      createdBeforeMs: fc.option(fc.nat({ max: 9 }), { freq: 2 }),
    });
    await fc.assert(
      fc.asyncProperty(
        fc.array(row, { maxLength: 40 }),
        fc.oneof(filter, fc.constant(EVERYTHING)),
        fc.nat({ max: 2 }),
        fc.integer({ min: 1, max: 7 }), // limit
        fc.integer({ min: 1, max: 12 }), // rows of a slice
        fc.constantFrom(impatient, patient),
        fc.nat({ max: 3 }), // projects that are read one by one
        fc.constantFrom(1, 5, 1_000), // characters of outputs, which are {} here
        async (rows, filter, viewer, limit, sliceRows, searching, separateProjectsMax, textMax) => {
          const caller = callers[viewer];
          if (caller === undefined) throw new Error('no such caller');
          store.execute('DELETE FROM deployments');
          const stored = insert(
            store,
            rows.map((one) => ({ ...one, projectId: projectIds[one.project] ?? '' })),
          );
          const expected = stored
            .filter(({ projectId }) => sees[viewer]?.some((id) => id === projectId))
            .filter((one) => matches(one, filter))
            .map(({ seq }) => seq)
            .reverse();

          const options = { sliceRows, separateProjectsMax, textMax, ...searching() };
          const page = deploymentPages(database, asTheyAre, options);
          const walked: number[] = [];
          let before: number | null = Number.MAX_SAFE_INTEGER;
          for (let pages = 0; before !== null; pages++) {
            if (pages > 200) throw new Error('the walk does not end');
            const { items, goOnAt }: ListPage<DeploymentRow> = await page(caller, filter, before, limit);
            if (items.length > limit) throw new Error('more than asked for');
            if (goOnAt !== null && goOnAt >= before) throw new Error('the walk does not go on');
            walked.push(...items.map(({ seq }) => seq));
            before = goOnAt;
          }
          deepEqual(walked, expected);
        },
      ),
      { numRuns: 300 },
    );
  },
);

t.test('a page without filters is full as long as there are more', async (t) => {
  const store = testStore(t);
  const [busy, quiet] = [await store.project(), await store.project()];
  insert(
    store,
    Array.from({ length: 60 }, (_, index) => row(index % 20 === 0 ? quiet : busy)),
  );
  const narrow = caller(await store.key({ allProjects: false, projectIds: [quiet] }), false);
  const wide = caller(await store.key());
  for (const [who, filter, count] of [
    [wide, EVERYTHING, 60],
    [wide, { ...EVERYTHING, projectId: busy }, 57],
    [narrow, EVERYTHING, 3],
  ] as const) {
    const first = await store.reads.deployments.page(who, filter, Number.MAX_SAFE_INTEGER, 2);
    t.equal(first.items.length, 2);
    t.not(first.goOnAt, null);
    const all = await store.reads.deployments.page(who, filter, Number.MAX_SAFE_INTEGER, count);
    t.equal(all.items.length, count);
    t.equal(all.goOnAt, null, 'and the last page says that it is the last');
  }
});

t.test('rare deployments are found slice by slice, with turns for others in between', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const who = caller(await store.key());
  const others = (count: number, status?: DeploymentStatus) =>
    insert(
      store,
      Array.from({ length: count }, () => row(projectId, status)),
    );
  const [first] = insert(store, [{ ...row(projectId, 'failed'), ref: 'rare', createdAt: 0 }]);
  const database = store.openReader();
  let turns = 0;
  const counting = async <Result>(task: () => Result) => {
    turns += 1;
    return task();
  };
  const options = { sliceRows: 30, inTurn: counting, inSpareTurn: counting };
  const page = deploymentPages(database, asTheyAre, options);
  const search = async (filter: Partial<DeploymentFilter>) => {
    turns = 0;
    const { items, goOnAt } = await page(who, { ...EVERYTHING, ...filter }, Number.MAX_SAFE_INTEGER, 10);
    t.equal(goOnAt, null);
    return { found: items.map(({ seq }) => seq), turns };
  };
  const unfinished: DeploymentFilter['statuses'] = ['queued', 'running', 'canceling'];
  const found = [first?.seq];

  others(89);
  t.strictSame(await search({ ref: 'rare' }), { found, turns: 3 + 1 }, 'and one to read what was found');
  others(1);
  for (const filter of [{ ref: 'rare' }, { statuses: ['failed'] }, { createdBeforeMs: 1 }] as const) {
    t.strictSame(await search(filter), { found, turns: 4 + 1 });
    t.strictSame(await search({ ...filter, projectId }), { found, turns: 4 + 1 });
  }
  t.strictSame(await search({ createdAfterMs: 1 }), { found: [], turns: 4 + 1 });
  t.strictSame(
    await search({ statuses: unfinished }),
    { found: [], turns: 1 + 1 },
    'unfinished deployments are found without a look at finished ones',
  );

  const [waiting] = insert(store, [{ ...row(projectId, 'queued'), ref: 'rare' }]);
  others(90, 'queued');
  t.strictSame(await search({ statuses: unfinished, ref: 'rare' }), {
    found: [waiting?.seq],
    turns: 4 + 1,
  });
});

t.test('pages that take long to read are read one by one, each in a turn of the event loop', async (t) => {
  const store = testStore(t);
  insert(store, [row(await store.project())]);
  const who = caller(await store.key());
  const database = store.openReader();
  let turn = 0;
  const counting = setImmediate(function count() {
    turn += 1;
    setImmediate(count).unref();
  });
  t.teardown(() => clearImmediate(counting));
  const readIn: number[] = [];
  const page = deploymentPages(database, (rows) => {
    readIn.push(turn);
    realEffects.block(TURN_MAX_MS);
    return asTheyAre(rows);
  });
  await Promise.all(Array.from({ length: 21 }, () => page(who, EVERYTHING, Number.MAX_SAFE_INTEGER, 10)));
  t.equal(readIn.length, 21);
  t.equal(new Set(readIn).size, 21);
});

t.test('a page that was searched for too long ends, and the next one goes on there', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const who = caller(await store.key());
  const [first] = insert(store, [{ ...row(projectId), ref: 'rare' }]);
  insert(
    store,
    Array.from({ length: 90 }, () => row(projectId)),
  );
  const database = store.openReader();
  const page = deploymentPages(database, asTheyAre, { sliceRows: 30, ...impatient() });
  const found: number[][] = [];
  for (let before: number | null = Number.MAX_SAFE_INTEGER; before !== null; ) {
    const { items, goOnAt }: ListPage<DeploymentRow> = await page(
      who,
      { ...EVERYTHING, ref: 'rare' },
      before,
      10,
    );
    found.push(items.map(({ seq }) => seq));
    before = goOnAt;
  }
  t.strictSame(found, [[], [], [], [first?.seq]]);
});

t.test('what changed or went while a page was searched is not in it', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  const who = caller(await store.key());
  const stored = insert(
    store,
    Array.from({ length: 6 }, () => row(projectId, 'queued')),
  );
  const database = store.openReader();
  const page = deploymentPages(database, asTheyAre, {
    sliceRows: 3,
    inSpareTurn: async (task) => {
      store.execute(`
        UPDATE deployments SET status = 'running', started_at = 1 WHERE seq = ${stored[5]?.seq};
        DELETE FROM deployments WHERE seq = ${stored[4]?.seq}`);
      return task();
    },
  });
  const { items, goOnAt } = await page(
    who,
    { ...EVERYTHING, statuses: ['queued'] },
    Number.MAX_SAFE_INTEGER,
    10,
  );
  t.equal(goOnAt, null);
  t.strictSame(
    items.map(({ seq }) => seq),
    [3, 2, 1, 0].map((index) => stored[index]?.seq),
  );
});

t.test('each slice is read in the way that gets furthest', async (t) => {
  const store = testStore(t);
  const [quiet, busy, elsewhere] = [await store.project(), await store.project(), await store.project()];
  const who = caller(await store.key({ allProjects: false, projectIds: [quiet, busy] }), false);
  const rows = (count: number, projectId: string, status?: DeploymentStatus) =>
    insert(
      store,
      Array.from({ length: count }, () => row(projectId, status)),
    );
  const database = store.openReader();
  const page = deploymentPages(database, asTheyAre, { sliceRows: 20, ...impatient() });
  const first = async (filter: Partial<DeploymentFilter>) => {
    const { items, goOnAt } = await page(who, { ...EVERYTHING, ...filter }, Number.MAX_SAFE_INTEGER, 10);
    return { found: items.map(({ seq }) => seq), goOnAt };
  };

  const [waiting] = rows(1, quiet, 'queued');
  rows(40, elsewhere, 'queued');
  t.strictSame(
    await first({ statuses: ['queued'], projectId: quiet }),
    { found: [waiting?.seq], goOnAt: null },
    'many that wait elsewhere are not in the way',
  );
  store.execute(
    `UPDATE deployments SET status = 'succeeded', finished_at = 1 WHERE project_id = '${elsewhere}'`,
  );
  rows(40, quiet);
  t.strictSame(
    await first({ statuses: ['queued'], projectId: quiet }),
    { found: [waiting?.seq], goOnAt: null },
    'nor many that ended in the project',
  );
  const end = rows(40, busy).at(-20);
  t.strictSame(
    await first({ ref: 'rare' }),
    { found: [], goOnAt: end?.seq },
    'where one project has them all, a slice is not cut to its share',
  );
});

t.test('a page of a project that the key does not see does not reveal how much there is', async (t) => {
  const store = testStore(t);
  const [hidden, seen] = [await store.project(), await store.project()];
  insert(
    store,
    Array.from({ length: 5 }, () => row(hidden)),
  );
  const who = caller(await store.key({ allProjects: false, projectIds: [seen] }), false);
  t.strictSame(
    await store.reads.deployments.page(who, { ...EVERYTHING, projectId: hidden }, Number.MAX_SAFE_INTEGER, 2),
    { items: [], goOnAt: null },
  );
});

t.test('the queued deployments of one project are listed without those of others', async (t) => {
  const store = testStore(t);
  const who = caller(await store.key());
  const waiting = [];
  for (const projectId of [await store.project(), await store.project()]) {
    waiting.push(await store.writer.write('deployments.create', newDeployment(projectId)));
  }
  for (const { id, project_id: projectId } of waiting) {
    const filter: DeploymentFilter = { ...EVERYTHING, projectId, statuses: ['queued'] };
    const { items } = await store.reads.deployments.page(who, filter, Number.MAX_SAFE_INTEGER, 10);
    t.strictSame(
      items.map((item) => item.id),
      [id],
    );
  }
});

t.test('a page over several projects looks at the same share of rows in each', async (t) => {
  const store = testStore(t);
  const projectIds = [await store.project(), await store.project()];
  const [quiet = '', busy = ''] = projectIds;
  const who = caller(await store.key({ allProjects: false, projectIds }), false);
  await store.key({ allProjects: false, projectIds: [await store.project()] }); // another's share is its own
  insert(
    store,
    Array.from({ length: 50 }, (_, index) => ({ ...row(index % 5 === 0 ? quiet : busy), gap: 3 })),
  );
  const database = store.openReader();
  const page = deploymentPages(database, asTheyAre, { sliceRows: 8, ...impatient() });
  const [floor] = store.query<{ seq: number }>(
    'SELECT seq FROM deployments WHERE project_id = ? ORDER BY seq DESC LIMIT 1 OFFSET 3',
    busy,
  );
  const { items, goOnAt } = await page(who, { ...EVERYTHING, ref: 'rare' }, Number.MAX_SAFE_INTEGER, 10);
  t.strictSame([items, goOnAt], [[], floor?.seq]);
});

t.test('a page ends where it has become large, and has one deployment at least', async (t) => {
  const store = testStore(t);
  const projectId = await store.project();
  insert(
    store,
    Array.from({ length: 7 }, () => row(projectId)),
  );
  store.execute(`UPDATE deployments SET outputs = '{"text":"${'x'.repeat(1_000)}"}' WHERE seq > 2`);
  const database = store.openReader();
  const who = caller(await store.key());
  const sizes = async (textMax: number) => {
    const page = deploymentPages(database, asTheyAre, { textMax });
    const found: number[] = [];
    for (let before: number | null = Number.MAX_SAFE_INTEGER; before !== null; ) {
      const { items, goOnAt }: ListPage<DeploymentRow> = await page(who, EVERYTHING, before, 6);
      found.push(items.length);
      before = goOnAt;
    }
    return found;
  };
  t.strictSame(await sizes(2 * 1_011), [2, 2, 3], 'small ones fill up what is left');
  t.strictSame(await sizes(10), [1, 1, 1, 1, 1, 2]);
  t.strictSame(await sizes(1_000_000), [6, 1]);
  store.execute(`UPDATE deployments SET outputs = '{}', message = '${'x'.repeat(1_009)}' WHERE seq > 2`);
  t.strictSame(await sizes(2 * 1_011), [2, 2, 3], 'messages count as outputs do');
});

t.test('with any filters, each waiting deployment is listed with its true queue position', async (t) => {
  const store = testStore(t);
  const projectIds = await Promise.all([1, 2, 3].map((number) => store.project({ name: `p${number}` })));
  const who = caller(await store.key());
  const row = fc.record({
    project: fc.nat({ max: 2 }),
    status: fc.constantFrom<DeploymentStatus>('queued', 'queued', 'succeeded'),
    ref: fc.constantFrom('main', 'v1'),
    reported: fc.constantFrom(0, 0, 0, 1),
    gap: fc.nat({ max: 2 }),
  });
  const filter = fc.record({
    projectId: fc.option(fc.constantFrom(...projectIds)),
    statuses: fc.option(fc.constant<DeploymentStatus[]>(['queued'])),
    ref: fc.option(fc.constantFrom('main', 'v1')),
  });
  await fc.assert(
    fc.asyncProperty(
      fc.array(row, { maxLength: 40 }),
      filter,
      fc.integer({ min: 1, max: 20 }),
      async (rows, filter, limit) => {
        store.execute('DELETE FROM deployments');
        const stored = insert(
          store,
          rows.map((one) => ({ ...one, projectId: projectIds[one.project] ?? '', createdAt: 1 })),
        );
        const positions = new Map<string, number | null>();
        const queued = new Map<string, number>();
        for (const [index, { seq, projectId, status }] of stored.entries()) {
          const waits = status === 'queued' && rows[index]?.reported === 0;
          if (waits) queued.set(projectId, (queued.get(projectId) ?? 0) + 1);
          positions.set(`dpl_${seq}`, waits ? (queued.get(projectId) ?? 0) : null);
        }
        for (let before: number | null = Number.MAX_SAFE_INTEGER; before !== null; ) {
          const { items, goOnAt }: ListPage<Deployment> = await store.reads.deployments.page(
            who,
            { ...EVERYTHING, ...filter },
            before,
            limit,
          );
          deepEqual(
            items.map(({ queue_position }) => queue_position),
            items.map(({ id }) => positions.get(id)),
          );
          before = goOnAt;
        }
      },
    ),
    { numRuns: 200 },
  );
});

t.test('a page counts each waiting deployment at most once for queue positions', async (t) => {
  const store = testStore(t);
  const projectIds = [await store.project(), await store.project()];
  insert(
    store,
    Array.from({ length: 200 }, (_, index) => ({
      ...row(projectIds[index % 2] ?? '', 'queued'),
      reported: 0,
    })),
  );
  const database = store.openReader();
  const counting = countingRows(database);
  const who = caller(await store.key());
  const { items } = await deploymentReads(counting.database).page(
    who,
    EVERYTHING,
    Number.MAX_SAFE_INTEGER,
    200,
  );
  t.strictSame([items.length, items[0]?.queue_position, items.at(-1)?.queue_position], [200, 100, 1]);
  const counted = counting.counted();
  t.ok(counted > 0 && counted <= 200, `${counted} were counted`);
});

t.test('no list query scans the whole table of deployments', async (t) => {
  const store = testStore(t);
  const database = store.openReader();
  const plans: string[] = [];
  const putInOrder: string[] = [];
  const explaining = preparedBy(database, (sql) => {
    const named = Object.fromEntries([...sql.matchAll(/:(\w+)/g)].map(([, name]) => [name, null]));
    const others = [...sql.matchAll(/\?/g)].map(() => null);
    const steps = database
      .prepare<unknown[], { parent: number; detail: string }>(`EXPLAIN QUERY PLAN ${sql}`)
      .all(...others, named);
    plans.push(...steps.map(({ detail }) => detail));
    const putsInOrder = steps.some(({ parent, detail }) => parent === 0 && /TEMP B-TREE/.test(detail));
    if (putsInOrder && sql.includes('d.outputs')) putInOrder.push(sql);
    return database.prepare(sql);
  });
  deploymentReads(explaining);
  t.ok(plans.length > 10);
  t.strictSame(
    plans.filter((step) => /^SCAN (d|n|deployments)\b(?!.* INDEX )/.test(step)),
    [],
  );
  t.strictSame(putInOrder, [], 'no sort carries outputs, which may be long');
  t.ok(plans.some((step) => step.includes('deployments_unfinished (seq>? AND seq<?)')));
  t.ok(plans.some((step) => step.includes('deployments_of_project (project_id=? AND seq>? AND seq<?)')));
});

/** As a page reads them. */
function asTheyAre(rows: readonly DeploymentRow[]): DeploymentRow[] {
  return [...rows];
}

/** Searches only one slice for a page: its time is over then. */
function impatient() {
  let ms = 0;
  return { monotonicMs: () => (ms += 1_000_000) };
}

/** Searches until a page is full or the list ends. */
function patient() {
  return { monotonicMs: () => 0 };
}

interface StoredDeployment {
  seq: number;
  projectId: string;
  status: DeploymentStatus;
  ref: string;
  createdAt: number;
}

function row(projectId: string, status: DeploymentStatus = 'succeeded') {
  return { projectId, status, ref: 'main', createdAt: 1, gap: 0 };
}

/** Rows with gaps and times as pruning and clock changes leave them; how they ended does not matter. */
function insert(
  store: TestStore,
  rows: (Omit<StoredDeployment, 'seq'> & { gap: number; reported?: number })[],
): StoredDeployment[] {
  let [{ seq } = { seq: 0 }] = store.query<{ seq: number }>(
    'SELECT coalesce(max(seq), 0) AS seq FROM deployments',
  );
  return rows.map((one) => {
    seq += 1 + one.gap;
    const { projectId, status, ref, createdAt, reported = 1 } = one;
    const ended = ['succeeded', 'failed', 'canceled'].includes(status);
    store.execute(`
      INSERT INTO deployments (seq, id, project_id, ref, status, reason, reported, trigger, created_at, started_at, finished_at)
      VALUES (${seq}, 'dpl_${seq}', '${projectId}', '${ref}', '${status}', 'reported', ${reported}, 'api', ${createdAt},
              ${status === 'queued' ? 'NULL' : createdAt}, ${ended ? createdAt : 'NULL'})`);
    return { seq, projectId, status, ref, createdAt };
  });
}

function matches(one: StoredDeployment, filter: DeploymentFilter): boolean {
  return (
    (filter.projectId === null || one.projectId === filter.projectId) &&
    (filter.statuses === null || filter.statuses.includes(one.status)) &&
    (filter.ref === null || one.ref === filter.ref) &&
    (filter.createdAfterMs === null || one.createdAt > filter.createdAfterMs) &&
    (filter.createdBeforeMs === null || one.createdAt < filter.createdBeforeMs)
  );
}
