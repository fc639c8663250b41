import t from 'tap';
import { COMMON_FAULTS, FAULT_KINDS, makePlan } from '../../scripts/chaos/plan.ts';

t.test('a plan depends only on its seed', async (t) => {
  const plan = makePlan(7, 60_000, FAULT_KINDS);
  t.strictSame(makePlan(7, 60_000, FAULT_KINDS), plan);
  t.not(makePlan(8, 60_000, FAULT_KINDS).hash, plan.hash);
  t.not(makePlan(7, 60_000, COMMON_FAULTS).hash, plan.hash);
  t.equal(plan.hash, 'c2d6c70db1d34e69', 'on every machine');
});

t.test('the steps of a plan are in order and within its time', async (t) => {
  const { steps, durationMs } = makePlan(1, 60_000, FAULT_KINDS);
  const times = steps.map(({ atMs }) => atMs);
  t.strictSame(
    times,
    times.toSorted((one, other) => one - other),
  );
  t.ok(times.every((atMs) => atMs >= 0 && atMs < durationMs));
});

t.test('a short plan has every kind of fault that was asked for, and no other', async (t) => {
  for (const kinds of [FAULT_KINDS, COMMON_FAULTS, ['kill'] as const]) {
    const { steps } = makePlan(1, 20_000, kinds);
    const planned = new Set(steps.flatMap((step) => ('fault' in step ? [step.fault.kind] : [])));
    t.strictSame([...planned].sort(), [...kinds].sort());
  }
});

t.test('a long plan leaves davit alive for a while', async (t) => {
  const { steps, durationMs } = makePlan(1, 5 * 60_000, FAULT_KINDS);
  const ends = steps.flatMap((step) =>
    'fault' in step && /kill|terminate|fsync|clock/.test(step.fault.kind) ? [step.atMs] : [],
  );
  const longestMs = Math.max(...ends.map((atMs, index) => atMs - (ends[index - 1] ?? 0)));
  t.ok(longestMs >= 0.25 * durationMs, `${longestMs} ms`);
});
