import { parentPort, workerData } from 'node:worker_threads';
import { realEffects } from '../effects.ts';
import { releaseStartMemory } from '../memory.ts';
import { checkpoint, connect } from './database.ts';
import { type FileIdentity, MOVED, openInPlace } from './place.ts';

/*
 * Checkpoints the WAL on request, concurrently with the writer. It is a thread of its own because a checkpoint ends
 * with fsyncs of the file, for which no commit or request should wait.
 */

/** What the thread is started with. */
export interface CheckpointThreadData {
  path: string;
  /** The files that the writer has open. */
  files: FileIdentity[];
}

export type ToCheckpointThread = 'checkpoint' | 'end';

if (parentPort === null) throw new Error('checkpoint-thread.ts runs as a worker thread');

const port = parentPort;
const { path, files } = workerData as CheckpointThreadData;
// If another file has the path by now, the WAL would be copied into that one, or lost.
const database = openInPlace(files, () => connect(path));
if (database === undefined) throw new Error(MOVED);
database.pragma('journal_mode = WAL'); // it is: this opens the -wal

port.on('message', (message: ToCheckpointThread) => {
  if (message === 'end') {
    database.close();
    port.close(); // nothing else keeps the thread alive
    return;
  }
  checkpoint(database);
  port.postMessage('done');
});
releaseStartMemory(realEffects, 'thread');
