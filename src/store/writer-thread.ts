import { type MessagePort, parentPort } from 'node:worker_threads';
import { realEffects } from '../effects.ts';
import { watchLag } from '../event-loop.ts';
import { POLL_OTHER_PROCESSES_EVERY_MS, startLoop } from '../loop.ts';
import { releaseStartMemory } from '../memory.ts';
import { createCheckpoints } from './checkpoints.ts';
import { concernsDeliveries, concernsDeployments } from './context.ts';
import { openForWriting } from './database.ts';
import { createGroupCommit } from './writer.ts';
import { writerFigures } from './writer-figures.ts';
import { serveWriter } from './writer-port.ts';

/** What the thread begins with. */
export interface WriterThreadData {
  path: string;
  /** Further doors to the same writer, for what came of deliveries. */
  ports: MessagePort[];
  /** Where it counts what it does; undefined: nobody asks. */
  figures: SharedArrayBuffer | undefined;
}

const POLL_EVERY_MS = 100;

if (parentPort === null) throw new Error('writer-thread.ts runs as a worker thread');

const owner = parentPort;
owner.once('message', (data: WriterThreadData) => write(owner, data));

function write(owner: MessagePort, { path, ports, figures: memory }: WriterThreadData): void {
  const figures = memory === undefined ? undefined : writerFigures(memory);
  const database = openForWriting(path, realEffects);
  const group = createGroupCommit(database, realEffects, figures);
  const checkpoints = createCheckpoints(path, database, realEffects, figures);
  const lookout = startLoop(
    async () => {
      group.pollOtherProcesses();
      // Found by looking at the WAL: of writes that nobody waits for, as those of retention, no commit tells.
      return checkpoints.poll() ? realEffects.now() + POLL_EVERY_MS : null;
    },
    // A read that fails now is tried again; what it means for writes is said there.
    { idleMs: POLL_OTHER_PROCESSES_EVERY_MS, effects: realEffects, onError: () => undefined },
  );
  if (figures !== undefined) watchLag(figures.lag, realEffects);
  serveWriter(group, owner, { concerns: concernsDeployments, patient: false }, close);
  for (const port of ports) serveWriter(group, port, { concerns: concernsDeliveries, patient: true }, close);
  owner.postMessage({ kind: 'ready' });
  releaseStartMemory(realEffects, 'thread');

  /** Last of all connections, so that the WAL is copied, emptied and removed. */
  async function close(): Promise<void> {
    await lookout.stop();
    await checkpoints.end();
    group.close();
    for (const port of ports) port.close();
  }
}
