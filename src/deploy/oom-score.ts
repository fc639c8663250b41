import { closeSync, openSync, readSync, writeSync } from 'node:fs';

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

/**
 * Raises the score of a process that was started like that, and so of its later children. A command that has set its own
 * by now, as by choom(1), keeps that.
 */
export function raiseOomScoreOf(processId: number): void {
  const inherited = Math.max(ownScore() ?? 0, STARTING_OOM_SCORE);
  try {
    const file = openSync(`/proc/${processId}/oom_score_adj`, 'r+');
    try {
      if (scoreIn(file) === inherited) writeSync(file, String(STARTED_OOM_SCORE), 0);
    } finally {
      closeSync(file);
    }
  } catch {
    // It has become another user, or no file descriptor is free: it keeps the score with which it was started.
  }
}

function raise(): void {
  const before = ownScore();
  if (before === undefined || before >= STARTING_OOM_SCORE) return;
  setScore(STARTING_OOM_SCORE);
  raisedFrom = before;
}

function lower(): void {
  if (raisedFrom !== undefined) setScore(raisedFrom);
  raisedFrom = undefined;
}

function ownScore(): number | undefined {
  try {
    scoreFile ??= openSync('/proc/self/oom_score_adj', 'r+');
    return scoreIn(scoreFile);
  } catch {
    return undefined;
  }
}

function scoreIn(file: number): number {
  return Number(scratch.toString('latin1', 0, readSync(file, scratch, 0, scratch.length, 0)));
}

function setScore(score: number): void {
  try {
    if (scoreFile !== undefined) writeSync(scoreFile, String(score), 0);
  } catch {
    // A container may forbid it; a command is then as likely to be killed as the service.
  }
}
