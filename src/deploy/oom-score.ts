import { openSync, readSync, writeFileSync, writeSync } from 'node:fs';

/** When memory runs out, the kernel is to kill a command and not the service: proc_pid_oom_score_adj(5). */
const STARTING_OOM_SCORE = 500;

/**
 * Of a command that has started. With the score that the service itself has while it starts another one, the service was
 * killed in place of a hundred small processes: starting takes memory, so that is when it runs out.
 */
const STARTED_OOM_SCORE = 1_000;

/** Kept open, as it is read once and written twice for each command. */
let scoreFile: number | undefined;
const scratch = Buffer.alloc(16);

let raisedFrom: number | undefined;
let startsUnderWay = 0;

/** Calls `start` while this process has a raised score, which a new process inherits. The last call lowers it again. */
export async function withRaisedOomScore<Result>(start: () => Promise<Result>): Promise<Result> {
  startsUnderWay += 1;
  if (startsUnderWay === 1) raise();
  try {
    return await start();
  } finally {
    startsUnderWay -= 1;
    if (startsUnderWay === 0) lower();
  }
}

/** Raises the score of a process that was started like that, and so of its later children. */
export function raiseOomScoreOf(processId: number): void {
  if ((ownScore() ?? 0) >= STARTED_OOM_SCORE) return;
  try {
    writeFileSync(`/proc/${processId}/oom_score_adj`, String(STARTED_OOM_SCORE), { flag: 'r+' });
  } catch {
    // It has become another user, or no file descriptor is free: it keeps the score with which it was started.
  }
}

function raise(): void {
  const before = ownScore();
  if (before === undefined || before >= STARTING_OOM_SCORE || !setScore(STARTING_OOM_SCORE)) return;
  raisedFrom = before;
}

function lower(): void {
  if (raisedFrom !== undefined) setScore(raisedFrom);
  raisedFrom = undefined;
}

function ownScore(): number | undefined {
  try {
    scoreFile ??= openSync('/proc/self/oom_score_adj', 'r+');
    return Number(scratch.toString('latin1', 0, readSync(scoreFile, scratch, 0, scratch.length, 0)));
  } catch {
    return undefined;
  }
}

function setScore(score: number): boolean {
  try {
    if (scoreFile !== undefined) writeSync(scoreFile, String(score), 0);
    return scoreFile !== undefined;
  } catch {
    // A container may forbid it; a command is then as likely to be killed as the service.
    return false;
  }
}
