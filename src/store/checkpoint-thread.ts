import { parentPort, workerData } from 'node:worker_threads';
import { realEffects } from '../effects.ts';
import { checkpoint, openForWriting } from './database.ts';

/*
 * Copies the WAL into the file on request, beside the writer. A thread of its own, as the copy ends with
 * fsyncs of the whole file, and nobody's commit or request should wait for those.
 */

if (parentPort === null) throw new Error('checkpoint-thread.ts runs as a worker thread');

const port = parentPort;
const database = openForWriting((workerData as { path: string }).path, realEffects);

port.on('message', () => {
  checkpoint(database);
  port.postMessage('done');
});
