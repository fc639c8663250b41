import { type MessagePort, parentPort } from 'node:worker_threads';
import { realEffects } from '../effects.ts';
import { watchLag } from '../event-loop.ts';
import { POLL_OTHER_PROCESSES_EVERY_MS, startLoop } from '../loop.ts';
import { releaseStartMemory } from '../memory.ts';
import { concernsDeliveries, concernsDeployments } from './changes.ts';
import { createCheckpoints } from './checkpoints.ts';
import { checkpoint, openForWriting } from './database.ts';
import { createGroupCommit } from './group-commit.ts';
import { writerMetrics } from './writer-metrics.ts';
import { serveWriter } from './writer-port.ts';

/** The first message to the thread. */
export interface WriterThreadData {
  path: string;
  /** Ports of further threads that write, the dispatcher's. Their writes have low priority. */
  ports: MessagePort[];
  /** The memory of the writer's metrics; undefined: metrics are off. */
  metricsMemory: SharedArrayBuffer | undefined;
}

const POLL_EVERY_MS = 100;

if (parentPort === null) throw new Error('writer-thread.ts runs as a worker thread');

const owner = parentPort;
owner.once('message', (data: WriterThreadData) => write(owner, data));

function write(owner: MessagePort, { path, ports, metricsMemory }: WriterThreadData): void {
  const metrics = metricsMemory && writerMetrics(metricsMemory);
  const database = openForWriting(path, realEffects);
  const group = createGroupCommit(database, realEffects, metrics);
  const checkpoints = createCheckpoints(path, database, realEffects, metrics);
  const polling = startLoop(
    async () => {
      group.pollOtherProcesses();
      // Polled, as not every commit announces changes: those of retention do not.
      return checkpoints.poll() ? realEffects.now() + POLL_EVERY_MS : null;
    },
    // A poll that fails is repeated; if writes fail too, they report it.
    { idleMs: POLL_OTHER_PROCESSES_EVERY_MS, effects: realEffects, onError: () => undefined },
  );
  if (metrics !== undefined) watchLag(metrics.lag, realEffects);
  serveWriter(group, owner, { concerns: concernsDeployments, lowPriority: false }, close);
  for (const port of ports)
    serveWriter(group, port, { concerns: concernsDeliveries, lowPriority: true }, close);
  owner.postMessage({ kind: 'ready' });
  releaseStartMemory(realEffects, 'thread');

  /**
   * Closes this connection as the last one of davit, so that SQLite removes the WAL. Copies it into the file before, as
   * SQLite does not while another process has the file open; what that is just reading stays in the WAL only.
   */
  async function close(): Promise<void> {
    await polling.stop();
    await checkpoints.end();
    group.close(() => checkpoint(database));
    for (const port of ports) port.close();
  }
}
