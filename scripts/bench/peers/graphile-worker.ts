import { setTimeout as delay } from 'node:timers/promises';
import { connectToPostgres, type PostgresPlace } from './postgres-accept.ts';
import type { Job, Queue } from './queue.ts';

/** The part of `graphile-worker` that is used here: it is not among davit's dependencies. */
interface GraphileWorker {
  run(options: object): Promise<{ stop(): Promise<void> }>;
  makeWorkerUtils(options: object): Promise<{ migrate(): Promise<void>; release(): Promise<void> }>;
  Logger: new (factory: () => () => void) => object;
}

/** As its manual advises for throughput: https://worker.graphile.org/docs/performance */
const TUNED = {
  concurrentJobs: 96,
  maxPoolSize: 20,
  localQueue: { size: 500 },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
};

/** It deletes finished jobs, and keeps no results. */
export async function createGraphileWorker(place: PostgresPlace): Promise<Queue> {
  const name = 'graphile-worker';
  const { run, makeWorkerUtils, Logger } = (await import(name)) as GraphileWorker;
  const pool = await connectToPostgres(place, TUNED.maxPoolSize);
  const common = { pgPool: pool, logger: new Logger(() => () => undefined) };
  const utilities = await makeWorkerUtils(common);
  await utilities.migrate();
  await utilities.release();

  return {
    async fill(jobs) {
      const specs = jobs.map((payload) => ({ identifier: 'deliver', payload }));
      const text = `
        SELECT count(*) FROM graphile_worker.add_jobs(
          array(SELECT json_populate_recordset(null::graphile_worker.job_spec, $1::json)))`;
      await pool.query({ name: 'add_jobs', text, values: [JSON.stringify(specs)] });
    },
    async work(deliver) {
      const runner = await run({
        ...common,
        noHandleSignals: true,
        preset: { worker: TUNED },
        taskList: { deliver: async (payload: Job) => void (await deliver(payload)) },
      });
      try {
        while (await someAreLeft()) await delay(20);
      } finally {
        await runner.stop();
      }
    },
  };

  async function someAreLeft(): Promise<boolean> {
    const { rows } = await pool.query('SELECT 1 FROM graphile_worker._private_jobs LIMIT 1');
    return rows.length > 0;
  }
}
