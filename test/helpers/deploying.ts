import { pino } from 'pino';
import type { Test } from 'tap';
import { createExecutor, type Executor, type ExecutorOptions } from '../../src/deploy/executor.ts';
import type { Deployment, DeploymentId, DeploymentStatus } from '../../src/domain.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { createAnswers } from '../../src/http/answers.ts';
import { deployments } from '../../src/http/deployments.ts';
import { logs } from '../../src/http/logs.ts';
import { createPages } from '../../src/http/pages.ts';
import { createWatches } from '../../src/http/watches.ts';
import { startLoop } from '../../src/loop.ts';
import { testSpawner, testWorkspaces } from './commands.ts';
import { type RunningHttp, startHttp } from './http.ts';
import { type TestStore, testStore } from './store.ts';
import { type CountedWatches, countWatches } from './watches.ts';

export interface DeploymentsHttp extends RunningHttp {
  watches: CountedWatches;
}

/** Deployments and their logs over HTTP; nothing carries them out. */
export async function startDeploymentsHttp(
  t: Test,
  options: { effects?: Effects; store?: TestStore; maxQueued?: number | null } = {},
): Promise<DeploymentsHttp> {
  const { effects = realEffects, maxQueued = 100 } = options;
  const store = options.store ?? testStore(t, effects);
  const watches = countWatches(createWatches(store.writer, effects));
  const pages = createPages(store.reads.instance.cursorSecret(), effects);
  const http = await startHttp(t, {
    effects,
    store,
    resources: () => [
      deployments(store.reads, createAnswers(store.writer), pages, watches, effects, maxQueued),
      logs(store.reads, watches, effects),
    ],
  });
  http.server.ext('onPreStop', watches.close);
  return { ...http, watches };
}

/** An executor with a real spawner; `tick` is called by the test. */
export function testExecutor(t: Test, store: TestStore, changes: Partial<ExecutorOptions> = {}): Executor {
  return createExecutor({
    store,
    spawner: testSpawner(t),
    effects: realEffects,
    logger: pino({ level: 'silent' }),
    maxConcurrent: 2,
    killGraceMs: 5_000,
    workspaces: testWorkspaces(t),
    ...changes,
  });
}

/** Carries out what is queued, woken by commits, as the service does. Stopped when the test ends. */
export async function startExecutor(
  t: Test,
  store: TestStore,
  changes: Partial<ExecutorOptions> = {},
): Promise<Executor> {
  const executor = testExecutor(t, store, changes);
  const loop = startLoop(executor.tick, {
    idleMs: 500,
    effects: realEffects,
    onError: (error) => t.fail('the executor failed', { error }),
  });
  store.writer.onCommit((commit) => {
    if (commit.has('queue')) loop.wake();
  });
  t.teardown(async () => {
    await loop.stop();
    await executor.stop(0);
  });
  return executor;
}

/** Resolves once the deployment has this status. */
export function untilStatus(
  { reads, writer }: TestStore,
  id: DeploymentId,
  status: DeploymentStatus,
): Promise<Deployment> {
  return new Promise((resolve) => {
    writer.onCommit(look);
    look();

    function look(): void {
      const deployment = reads.deployments.get(id);
      if (deployment?.status === status) resolve(deployment);
    }
  });
}
