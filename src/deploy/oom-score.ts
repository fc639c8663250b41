import { openSync, readSync, writeSync } from 'node:fs';

/** When memory runs out, the kernel shall take a command and not the service: proc_pid_oom_score_adj(5). */
const COMMAND_OOM_SCORE = 500;

/** Kept open: it is looked at and written twice for each command. */
let scoreFile: number | undefined;
const scratch = Buffer.alloc(16);

let raisedFrom: number | undefined;
let inHand = 0;

/** What is started meanwhile inherits a raised score; this process has it back when all such are done. */
export async function withRaisedOomScore<Result>(start: () => Promise<Result>): Promise<Result> {
  inHand += 1;
  if (inHand === 1) raise();
  try {
    return await start();
  } finally {
    inHand -= 1;
    if (inHand === 0) lower();
  }
}

function raise(): void {
  const before = ownScore();
  if (before === undefined || before >= COMMAND_OOM_SCORE || !setScore(COMMAND_OOM_SCORE)) return;
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
    // A container may forbid it; a command is then as likely to be ended as the service.
    return false;
  }
}
