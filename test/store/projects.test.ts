import t from 'tap';
import type { ProjectId } from '../../src/domain.ts';
import type { ProjectDetails, ProjectSettings } from '../../src/store/projects.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { caller, newDeployment, testStore } from '../helpers/store.ts';

type Settings = Omit<ProjectSettings, 'variables'>;
type Changes = Partial<Settings>;

/** Of every setting another value than new projects of tests have, and how it is shown. */
const OTHERWISE: {
  [Name in keyof Settings]: [changes: Pick<Settings, Name>, shown: Partial<ProjectDetails>];
} = {
  name: [{ name: 'docs' }, { name: 'docs' }],
  command: [{ command: ['/bin/false', 'all'] }, { command: ['/bin/false', 'all'] }],
  directory: [{ directory: '/srv' }, { directory: '/srv' }],
  timeoutMs: [{ timeoutMs: null }, { timeout_ms: null }],
  idleTimeoutMs: [{ idleTimeoutMs: 60_000 }, { idle_timeout_ms: 60_000 }],
  reportTimeoutMs: [{ reportTimeoutMs: 3_600_000 }, { report_timeout_ms: 3_600_000 }],
  policy: [{ policy: 'latest' }, { policy: 'latest' }],
};

t.test('a key without all projects sees its own, and none that only another key has', async (t) => {
  const store = testStore(t);
  const [one, other, both] = [await store.project(), await store.project(), await store.project()];
  for (const [projectIds, hidden] of [
    [[one, both], other],
    [[other, both], one],
  ] as const) {
    const { keyId } = await store.key({ allProjects: false, projectIds: [...projectIds] });
    const confined = caller({ keyId }, false);
    t.strictSame(
      store.reads.projects.page(confined, 0, 10).items.map(({ id }) => id),
      projectIds,
    );
    for (const id of projectIds) t.match(store.reads.projects.visibleTo(confined, id), { id });
    t.equal(store.reads.projects.visibleTo(confined, hidden), undefined);
    t.match(store.reads.projects.visibleTo(caller({ keyId }), hidden), { id: hidden });
  }
});

t.test('pages and the list of all projects begin with the oldest', async (t) => {
  const store = testStore(t);
  const ids = [await store.project(), await store.project(), await store.project()];
  const { keyId } = await store.key({ allProjects: false, projectIds: ids.toReversed() });
  for (const allProjects of [false, true]) {
    const asks = caller({ keyId }, allProjects);
    const page = (afterSeq: number) => store.reads.projects.page(asks, afterSeq, 2);
    const [first, second] = [page(0), page(page(0).goOnAt ?? 0)];
    t.strictSame(
      [first, second].map(({ items }) => items.map(({ id }) => id)),
      [ids.slice(0, 2), ids.slice(2)],
    );
  }
  t.strictSame(
    store.reads.projects.list().map(({ id }) => id),
    ids,
  );
});

t.test(
  'a project is found by its id, and by its name unless another that is not archived has it',
  async (t) => {
    const store = testStore(t);
    const id = await store.project({ name: 'docs' });
    await store.project();
    for (const name of [id, 'docs']) t.match(store.reads.projects.resolve(name), { id });
    const second = await store.project({ name: 'docs' });
    t.throws(() => store.reads.projects.resolve('docs'), { code: 'conflict' });
    t.match(store.reads.projects.resolve(second), { id: second });
    t.throws(() => store.reads.projects.resolve('nothing'), { code: 'not_found' });
    const archive = (one: ProjectId) =>
      store.writer.write('projects.setStatus', { id: one, status: 'archived' });
    await archive(id);
    t.match(store.reads.projects.resolve('docs'), { id: second });
    await store.writer.write('projects.setStatus', { id: second, status: 'paused' });
    t.match(store.reads.projects.resolve('docs'), { id: second });
    await archive(second);
    t.throws(() => store.reads.projects.resolve('docs'), { code: 'conflict' });
  },
);

t.test('a new project has every setting that was given', async (t) => {
  const store = testStore(t);
  for (const [settings, shown] of Object.values(OTHERWISE)) {
    const id = await store.project(settings);
    t.match(store.reads.projects.resolve(id), shown);
  }
});

t.test('an update of a project changes only what is given, and no other project', async (t) => {
  const store = testStore(t);
  const variables = { A: '1', B: '2' };
  const [id, other] = [await store.project({ variables }), await store.project({ variables })];
  await store.writer.write('deployments.create', newDeployment(id));
  const elsewhere = [store.reads.projects.resolve(other), store.reads.projects.variables(other)];
  const set = (
    changes: Changes,
    rest: { variables?: Record<string, string>; unsetVariables?: string[] } = {},
  ) => store.writer.write('projects.set', { id, changes, variables: {}, unsetVariables: [], ...rest });
  let expected = store.reads.projects.resolve(id);
  for (const [changes, shown] of Object.values(OTHERWISE)) {
    expected = { ...expected, ...shown };
    t.strictSame(await set(changes), expected);
    t.strictSame(store.reads.projects.resolve(id), expected);
  }
  t.match(await set({}, { variables: { B: '3', C: '4' }, unsetVariables: ['A', 'C'] }), {
    ...expected,
    variable_names: ['B', 'C'],
  });
  t.strictSame(store.reads.projects.variables(id), { B: '3', C: '4' }, 'setting wins over unsetting');
  await store.writer.write('projects.setStatus', { id, status: 'paused' });
  t.strictSame([store.reads.projects.resolve(other), store.reads.projects.variables(other)], elsewhere);
});

t.test(
  'pausing and resuming a project notify the queue, and are not_found for an unknown project',
  async (t) => {
    const store = testStore(t);
    const id = await store.project();
    const heard: string[] = [];
    store.writer.onCommit((changes) => heard.push(...changes));
    for (const status of ['paused', 'active'] as const) {
      t.match(await store.writer.write('projects.setStatus', { id, status }), { id, status });
    }
    t.strictSame(heard, ['queue', 'queue']);
    const missing = { id: 'prj_0000000000000000000000' as ProjectId, status: 'active' } as const;
    await t.rejects(store.writer.write('projects.setStatus', missing), { code: 'not_found' });
  },
);

t.test('a new report timeout moves when reports are due that are awaited already', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const id = await store.project({ command: null, reportTimeoutMs: 60_000 });
  const others = await store.project({ command: null, reportTimeoutMs: 60_000 });
  const [open, ended] = [newDeployment(id), newDeployment(id)];
  const { id: openId } = await store.writer.write('deployments.create', open);
  const { id: endedId } = await store.writer.write('deployments.create', ended);
  const { id: othersId } = await store.writer.write('deployments.create', newDeployment(others));
  const createdAtMs = effects.now();
  await store.writer.write('deployments.cancel', { id: endedId });
  effects.advance(10_000);
  const set = (changes: Changes) =>
    store.writer.write('projects.set', { id, changes, variables: {}, unsetVariables: [] });
  const dueAfterMs = (deploymentId: string) => {
    const [row] = store.query<{ report_due_at: number | null }>(
      'SELECT report_due_at FROM deployments WHERE id = ?',
      deploymentId,
    );
    return typeof row?.report_due_at === 'number' ? row.report_due_at - createdAtMs : null;
  };

  const rows: [changes: Changes, dueAfterMs: number | null, why: string][] = [
    [{ reportTimeoutMs: 90_000 }, 90_000, 'later'],
    [{ reportTimeoutMs: 5_000 }, 5_000, 'earlier, even in the past'],
    [{ name: 'fleet' }, 5_000, 'as before without a new timeout'],
    [{ reportTimeoutMs: null }, null, 'never'],
    [{ reportTimeoutMs: 60_000 }, 70_000, 'from none on it counts from now'],
    [{ reportTimeoutMs: 60_000 }, 70_000, 'the same again changes nothing'],
    [
      { command: ['/bin/true'], reportTimeoutMs: 61_000 },
      71_000,
      'also those of a project with a command now',
    ],
  ];
  for (const [changes, expected, why] of rows) {
    await set(changes);
    t.equal(dueAfterMs(openId), expected, why);
  }
  t.strictSame([endedId, othersId].map(dueAfterMs), [60_000, 60_000], 'no others');

  // As after the clock was set ahead by an hour.
  await store.writer.write('deployments.moveReportsDue', {
    byMs: 3_600_000,
    atMs: effects.now() + 3_600_000,
    lastSeq: 3,
  });
  await set({ reportTimeoutMs: 51_000 });
  t.equal(dueAfterMs(openId), 3_661_000, 'the correction stays');

  // As an earlier davit left it, that changed the timeout only for later deployments.
  store.execute(`UPDATE projects SET report_timeout_ms = 86400000 WHERE id = '${id}'`);
  await set({ reportTimeoutMs: 72_000_000 });
  t.equal(dueAfterMs(openId), 72_000_000, 'it has the new time at least');

  effects.jump(-86_400_000 * 30);
  for (const reportTimeoutMs of [null, 60_000]) await set({ reportTimeoutMs });
  t.equal(dueAfterMs(openId), effects.now() + 60_000 - createdAtMs, 'from now, however the clock was set');
});

t.test('a command that deployments wait for cannot be taken away', async (t) => {
  const store = testStore(t);
  const id = await store.project();
  await store.writer.write('deployments.create', newDeployment(id));
  const before = store.dump();
  const takeAway = () =>
    store.writer.write('projects.set', {
      id,
      changes: { command: null },
      variables: { A: '1' },
      unsetVariables: [],
    });
  await t.rejects(takeAway(), { code: 'conflict', message: /\(1\)/ });
  t.strictSame(store.dump(), before);
  await store.writer.write('deployments.claim', undefined);
  t.match(await takeAway(), { command: null, variable_names: ['A'] });
});
