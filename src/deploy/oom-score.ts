import { readFileSync, writeFileSync } from 'node:fs';

/** When memory runs out, the kernel shall take a command and not the service: proc_pid_oom_score_adj(5). */
const COMMAND_OOM_SCORE = 500;
const OOM_SCORE_FILE = '/proc/self/oom_score_adj';

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
    return Number(readFileSync(OOM_SCORE_FILE, 'latin1'));
  } catch {
    return undefined;
  }
}

function setScore(score: number): boolean {
  try {
    writeFileSync(OOM_SCORE_FILE, String(score));
    return true;
  } catch {
    // A container may forbid it; a command is then as likely to be ended as the service.
    return false;
  }
}
