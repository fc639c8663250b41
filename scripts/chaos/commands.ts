import { writeFileSync } from 'node:fs';

/** What the command of a deployment does; its ref begins with it. */
export type CommandKind =
  | 'quick'
  | 'fails'
  | 'slow'
  | 'outputs'
  | 'deaf'
  | 'scatters'
  | 'floods'
  | 'dies'
  | 'hangs';

/** How a deployment of this kind ends, unless it is canceled or interrupted. */
export const EXPECTED_ENDS: Record<
  CommandKind,
  { status: 'succeeded' | 'failed'; reason: string | null; exitCode: number | null; logBytes: number | null }
> = {
  quick: { status: 'succeeded', reason: null, exitCode: 0, logBytes: 6 },
  fails: { status: 'failed', reason: 'exit_code', exitCode: 3, logBytes: 5 },
  slow: { status: 'succeeded', reason: null, exitCode: 0, logBytes: 10 },
  outputs: { status: 'succeeded', reason: null, exitCode: 0, logBytes: 0 },
  deaf: { status: 'succeeded', reason: null, exitCode: 0, logBytes: 0 },
  scatters: { status: 'succeeded', reason: null, exitCode: 0, logBytes: 0 },
  floods: { status: 'succeeded', reason: null, exitCode: 0, logBytes: 1_000_000 },
  dies: { status: 'failed', reason: 'signal', exitCode: null, logBytes: 0 },
  hangs: { status: 'failed', reason: 'timeout', exitCode: null, logBytes: 0 },
};

/** Only `hangs` reaches it. */
export const COMMAND_TIMEOUT = '12s';

/**
 * The command of every project. It first records that it runs, by a line in a file that is not davit's. `scatters`
 * waits for its children, so that none of them is a daemon that davit would leave alone.
 */
const SCRIPT = `#!/bin/sh
echo "$DEPLOY_ID" >>"$CHAOS_RUNS"
case "$DEPLOY_REF" in
  quick/*) echo quick ;;
  fails/*) echo alas >&2; exit 3 ;;
  slow/*) echo half; sleep 1.5; echo full ;;
  outputs/*) echo "ref=$DEPLOY_REF" >>"$DEPLOY_OUTPUT" ;;
  deaf/*) trap '' TERM; for i in 1 2 3 4 5 6 7 8; do sleep 0.3; done ;;
  scatters/*)
    setsid sh -c 'trap "" TERM; sleep 1.2' >/dev/null 2>&1 &
    setsid setsid sleep 1.1 &
    wait; sleep 0.3 ;;
  floods/*) head -c 1000000 /dev/zero | tr '\\0' x ;;
  dies/*) kill -9 $$ ;;
  hangs/*) sleep 600 ;;
esac
`;

/** Writes the command to `path`. */
export function writeCommand(path: string): void {
  writeFileSync(path, SCRIPT, { mode: 0o755 });
}
