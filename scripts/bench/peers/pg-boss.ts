import type { PostgresPlace } from './postgres-accept.ts';
import type { Job, Queue } from './queue.ts';

/** The part of `pg-boss` that is used here: it is not among davit's dependencies. */
interface PgBoss {
  start(): Promise<unknown>;
  createQueue(name: string): Promise<void>;
  insert(name: string, jobs: { data: Job }[]): Promise<unknown>;
  fetch(name: string, options: { batchSize: number }): Promise<{ id: string; data: Job }[]>;
  complete(name: string, ids: string[], result: object): Promise<unknown>;
  on(event: 'error', listener: (error: unknown) => void): void;
}

/** While one batch is being sent, others are fetched and completed. */
const BATCHES_AT_A_TIME = 4;

/**
 * The fastest way to use it: fetch a batch, send all of it at once, complete it together, and so on. Its own `work()`
 * does the same, but sleeps in between.
 */
export async function createPgBoss(place: PostgresPlace, concurrency: number): Promise<Queue> {
  const name = 'pg-boss';
  const module = (await import(name)) as { PgBoss: new (options: object) => PgBoss };
  const boss = new module.PgBoss({ ...place, max: BATCHES_AT_A_TIME + 2 });
  boss.on('error', (error) => process.stderr.write(`${error}\n`));
  await boss.start();
  await boss.createQueue('deliveries');

  return {
    async fill(jobs) {
      const rows = jobs.map((data) => ({ data }));
      await boss.insert('deliveries', rows);
    },
    async work(deliver) {
      const workOff = async () => {
        for (;;) {
          const batch = await boss.fetch('deliveries', { batchSize: concurrency });
          if (batch.length === 0) return;
          await Promise.all(batch.map(({ data }) => deliver(data)));
          const ids = batch.map(({ id }) => id);
          await boss.complete('deliveries', ids, { status: 200 });
        }
      };
      await Promise.all(Array.from({ length: BATCHES_AT_A_TIME }, workOff));
    },
  };
}
