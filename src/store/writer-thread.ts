import { type MessagePort, parentPort, type Worker, workerData } from 'node:worker_threads';
import { startThread } from '../assets.ts';
import { realEffects } from '../effects.ts';
import { watchLag } from '../event-loop.ts';
import { LOOK_OUTSIDE_EVERY_MS, startLoop } from '../loop.ts';
import { releaseStartMemory } from '../memory.ts';
import type { CheckpointThreadData } from './checkpoint-thread.ts';
import { concernsDeliveries, concernsDeployments } from './context.ts';
import { checkpoint, openForWriting } from './database.ts';
import { whereaboutsOf } from './place.ts';
import { walUseOf } from './wal.ts';
import { createGroupCommit } from './writer.ts';
import { type CheckpointKind, writerFigures } from './writer-figures.ts';
import { serveWriter } from './writer-port.ts';

/** What the thread is started with. */
export interface WriterThreadData {
  path: string;
  /** Further doors to the same writer, for what came of deliveries. */
  ports: MessagePort[];
  /** Where it counts what it does; undefined: nobody asks. */
  figures: SharedArrayBuffer | undefined;
}

/** 4 MiB that are not in the file: small enough to stay in the page cache, large enough that hot pages are copied once. */
const CHECKPOINT_AT_BYTES = 4 * 1024 * 1024;
/** With more in use the writer itself copies the rest, so that the next write begins the WAL anew. */
const CATCH_UP_AT_BYTES = 32 * 1024 * 1024;
/** The checkpointer comes so near first, as nobody's write goes on meanwhile: 10 ms for a MiB. */
const CATCH_UP_REST_BYTES = 256 * 1024;
const CATCH_UP_ROUNDS = 3;
const LOOK_EVERY_MS = 100;
const CHECKPOINTER_IDLE_MS = 30_000;

if (parentPort === null) throw new Error('writer-thread.ts runs as a worker thread');

const { path, ports, figures: memory } = workerData as WriterThreadData;
const figures = memory === undefined ? undefined : writerFigures(memory);
const database = openForWriting(path, realEffects);
// The copying and its fsyncs happen in the checkpoint thread: nobody's commit waits for them.
database.pragma('wal_autocheckpoint = 0');
// To write over what is there takes half the time of making a file longer, and to cut 40 MB off took 20 ms.
database.pragma(`journal_size_limit = ${CATCH_UP_AT_BYTES}`);
const walUse = walUseOf(database);
const group = createGroupCommit(database, realEffects, figures);
const whereabouts = whereaboutsOf(path);
let checkpointer: Worker | undefined;
let checkpointing = false;
let catchUpRounds = 0;
let cancelEnd = () => {};
let askedAtMs = 0;
let lastUsedBytes = 0;

const lookout = startLoop(
  async () => {
    group.lookOutside();
    // Of what nobody waits for, what retention removes most of all, nobody is told.
    return checkpointWhenLarge() ? realEffects.now() + LOOK_EVERY_MS : null;
  },
  // A read that fails now is tried again; what it means for writes is said there.
  { idleMs: LOOK_OUTSIDE_EVERY_MS, effects: realEffects, onError: () => undefined },
);
if (figures !== undefined) watchLag(figures.lag, realEffects);
serveWriter(group, parentPort, { concerns: concernsDeployments, patient: false }, close);
for (const port of ports) serveWriter(group, port, { concerns: concernsDeliveries, patient: true }, close);
parentPort.postMessage({ kind: 'ready' });
releaseStartMemory(realEffects, 'thread');

/** Whether anything was written since the last look. */
function checkpointWhenLarge(): boolean {
  const { usedBytes, uncopiedBytes } = walUse();
  if (!checkpointing && uncopiedBytes >= CHECKPOINT_AT_BYTES) askForCheckpoint();
  const grew = usedBytes !== lastUsedBytes;
  lastUsedBytes = usedBytes;
  return grew;
}

function askForCheckpoint(): void {
  askedAtMs = realEffects.monotonicMs();
  cancelEnd();
  try {
    checkpointer ??= startCheckpointer();
  } catch {
    copyHere();
    return;
  }
  checkpointing = true;
  checkpointer.postMessage('checkpoint');
}

/**
 * Only while there is much to write: a thread takes 8 MB. Where there can be no further thread or open file, which is said
 * now or later, the writer, which needs neither, does its work. So it does where the thread does not find the file in its
 * place.
 */
function startCheckpointer(): Worker {
  const thread = startThread('store/checkpoint-thread', {
    workerData: { path, whereabouts } satisfies CheckpointThreadData,
  });
  thread.on('error', () => undefined); // it exits then
  thread.on('exit', () => {
    if (checkpointer !== thread) return;
    checkpointer = undefined;
    checkpointing = false;
    copyHere();
  });
  thread.on('message', () => {
    checkpointing = false;
    note('background', askedAtMs);
    cancelEnd = realEffects.after(CHECKPOINTER_IDLE_MS, () => void endCheckpointer());
    catchUp();
  });
  return thread;
}

/** Forgotten first: what ends it here is no want of a thread. */
async function endCheckpointer(): Promise<void> {
  const thread = checkpointer;
  checkpointer = undefined;
  await thread?.terminate();
}

/** Under steady load the checkpointer never meets the end of the WAL. */
function catchUp(): void {
  const { usedBytes, uncopiedBytes } = walUse();
  if (usedBytes <= CATCH_UP_AT_BYTES) {
    catchUpRounds = 0;
  } else if (uncopiedBytes > CATCH_UP_REST_BYTES && catchUpRounds < CATCH_UP_ROUNDS) {
    catchUpRounds += 1;
    askForCheckpoint();
  } else {
    catchUpRounds = 0;
    copyHere();
  }
}

function copyHere(): void {
  const startedAtMs = realEffects.monotonicMs();
  checkpoint(database);
  note('catch_up', startedAtMs);
}

function note(kind: CheckpointKind, sinceMs: number): void {
  figures?.checkpointed(kind, realEffects.monotonicMs() - sinceMs);
}

/** Last of all connections, so that the WAL is copied, emptied and removed. */
async function close(): Promise<void> {
  await lookout.stop();
  cancelEnd();
  await endCheckpointer();
  group.close();
  for (const port of ports) port.close();
}
