import { parentPort, workerData } from 'node:worker_threads';
import { realEffects } from '../effects.ts';
import { releaseStartMemory } from '../memory.ts';
import { checkpoint, openForWriting } from './database.ts';
import { areInPlace, MOVED, type Whereabouts } from './place.ts';

/*
 * Copies the WAL into the file on request, beside the writer. A thread of its own, as the copy ends with
 * fsyncs of the whole file, and nobody's commit or request should wait for those.
 */

/** What the thread is started with. */
export interface CheckpointThreadData {
  path: string;
  /** Of the file whose WAL it copies. */
  whereabouts: Whereabouts;
}

if (parentPort === null) throw new Error('checkpoint-thread.ts runs as a worker thread');

const port = parentPort;
const { path, whereabouts } = workerData as CheckpointThreadData;
// Opened by its name: the WAL would be copied into whichever file has that by now, or be lost.
if (!areInPlace(whereabouts)) throw new Error(MOVED);
const database = openForWriting(path, realEffects);

port.on('message', () => {
  checkpoint(database);
  port.postMessage('done');
});
releaseStartMemory(realEffects, 'thread');
