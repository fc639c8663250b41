import type { Job, Queue } from './queue.ts';

/** The part of `bullmq` and `ioredis` that is used here: they are not among davit's dependencies. */
interface Bullmq {
  Queue: new (
    name: string,
    options: object,
  ) => {
    addBulk(jobs: { name: string; data: Job }[]): Promise<unknown>;
  };
  Worker: new (
    name: string,
    work: (job: { data: Job }) => Promise<unknown>,
    options: object,
  ) => {
    on(event: 'completed', listener: () => void): void;
    on(event: 'failed' | 'error', listener: (...details: unknown[]) => void): void;
    close(): Promise<void>;
  };
}

/** One queue and one worker; results stay in Redis, as by default. */
export async function createBullmq(socketPath: string, concurrency: number): Promise<Queue> {
  const bullmqName = 'bullmq';
  const ioredisName = 'ioredis';
  const { Queue, Worker } = (await import(bullmqName)) as Bullmq;
  const { Redis } = (await import(ioredisName)) as { Redis: new (options: object) => object };
  const connection = () => new Redis({ path: socketPath, maxRetriesPerRequest: null });
  const queue = new Queue('deliveries', { connection: connection() });
  let waiting = 0;

  return {
    async fill(jobs) {
      await queue.addBulk(jobs.map((data) => ({ name: 'deliver', data })));
      waiting += jobs.length;
    },
    async work(deliver) {
      const done = Promise.withResolvers<void>();
      const worker = new Worker('deliveries', async ({ data }) => ({ status: await deliver(data) }), {
        connection: connection(),
        concurrency,
      });
      worker.on('completed', () => {
        waiting -= 1;
        if (waiting === 0) done.resolve();
      });
      worker.on('failed', (_job, error) => done.reject(error));
      worker.on('error', (error) => done.reject(error));
      await done.promise;
      await worker.close();
    },
  };
}
