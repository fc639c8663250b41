import { setImmediate as nextTurn } from 'node:timers/promises';
import { realEffects } from '../effects.ts';
import { childrenOfMainThread, newestId, processIds, readEnvironment, readProc, threadIds } from '../proc.ts';
import {
  hasExited,
  identityOf,
  isAlive,
  type ProcessIdentity,
  type ProcessStat,
  readStat,
} from '../process-identity.ts';
import { TURN_MAX_MS } from '../turns.ts';
import { DEPLOYMENT_MARKER } from './environment.ts';

/** What SIGTERM does to a process: `gone` when it has exited already, even if it is still a zombie. */
export type TerminationDisposition = 'gone' | 'default' | 'caught' | 'ignored';

/** What SIGTERM would do to that process now. */
export function terminationDisposition(identity: ProcessIdentity): TerminationDisposition {
  if (!isAlive(identity)) return 'gone';
  const status = readProc(`/proc/${identity.processId}/status`) ?? '';
  if (holdsSigterm(status, 'SigIgn')) return 'ignored';
  // A process that blocks it may accept it by sigwait(3) or signalfd(2), as tini does.
  return holdsSigterm(status, 'SigCgt') || holdsSigterm(status, 'SigBlk') ? 'caught' : 'default';
}

/** The processes that were started with the marker of one of these deployments: one pass over /proc. */
export async function findMarked(
  deploymentIds: ReadonlySet<string>,
): Promise<Map<string, ProcessIdentity[]>> {
  const found = new Map<string, ProcessIdentity[]>();
  await visitProcesses((stat, marker) => {
    const deploymentId = marker();
    if (deploymentId === undefined || !deploymentIds.has(deploymentId)) return;
    const identities = found.get(deploymentId) ?? [];
    identities.push(identityOf(stat));
    found.set(deploymentId, identities);
  });
  return found;
}

/** Whether SIGTERM, which is 15, is in a mask such as `SigIgn:\t0000000000004000`, proc_pid_status(5). */
function holdsSigterm(status: string, mask: string): boolean {
  const digits = new RegExp(`^${mask}:\\s*([0-9a-f]+)$`, 'm').exec(status)?.[1] ?? '0';
  return (BigInt(`0x${digits}`) & (1n << 14n)) !== 0n;
}

/** `marker` reads the process's marker when it is first called. */
type Visit = (stat: ProcessStat, marker: () => string | undefined) => void;

let nextPass: { visits: Visit[]; ended: Promise<void> } | undefined;
let lastEnded: Promise<unknown> = Promise.resolve();

/**
 * Visits the processes that run, but for this one and kernel threads. Newest first: one that forks and exits is met
 * before it has exited. All calls made before a pass begins share it: with one pass for each, fifty trees of ten
 * processes that were ended together took more than the 30 s of a stop.
 */
export function visitProcesses(visit: Visit): Promise<void> {
  if (nextPass === undefined) {
    const visits: Visit[] = [];
    nextPass = { visits, ended: passFor(visits) };
    lastEnded = nextPass.ended.catch(() => undefined);
  }
  nextPass.visits.push(visit);
  return nextPass.ended;
}

async function passFor(visits: readonly Visit[]): Promise<void> {
  await lastEnded;
  await nextTurn(); // callers that the last pass has served may at once want to share this one
  nextPass = undefined;
  const visited = new Set<number>([process.pid]);
  // A chain of processes that each fork and exit at once was reparented to this process by then: in the list of all
  // processes only one pass in a hundred meets it.
  await visitEach(childrenOfMainThread());
  for (let list = 0; list < LISTS; list++) {
    await visitEach(youngestIds());
    await visitEach(processIds().sort((one, other) => other - one));
    await nextTurn();
  }

  /**
   * As many in one turn of the event loop as its time allows: one takes 12 to 26 µs, but 50 ms if another user gave it an
   * environment of 6 MiB.
   */
  async function visitEach(ids: readonly number[]): Promise<void> {
    let beganAtMs = realEffects.monotonicMs();
    for (const processId of ids) {
      if (visited.has(processId)) continue;
      if (realEffects.monotonicMs() - beganAtMs >= TURN_MAX_MS) {
        await nextTurn();
        beganAtMs = realEffects.monotonicMs();
      }
      visited.add(processId);
      const stat = readStat(processId);
      if (stat === undefined || hasExited(stat) || isKernelThread(stat)) continue;
      const marker = once(() => markerOf(stat));
      for (const visit of visits) visit(stat, marker);
    }
  }
}

/**
 * How often a pass lists the processes; after the first time it visits only those that are new. With 1,000 processes on
 * a busy machine a pass takes 200 ms, and a list 1 of them: a chain of processes that each fork and exit at once, which
 * a pass with one list rarely meets, outlived all passes that `areGone` of process-tree.ts waits for.
 */
const LISTS = 8;

/**
 * The last ids that were given out, those of threads and of nobody among them. /proc is listed from the lowest id:
 * where ids had begun again from there, a chain that forks every millisecond was gone by the end of a list of 2,500
 * processes, and half of the passes missed it. None of 80 did once these were looked at first.
 */
function youngestIds(): number[] {
  const newest = newestId() ?? 0;
  return Array.from({ length: 8 }, (_, index) => newest - index);
}

function once<Value>(read: () => Value): () => Value {
  let result: { value: Value } | undefined;
  return () => {
    result ??= { value: read() };
    return result.value;
  };
}

const PF_KTHREAD = 0x00200000; // include/linux/sched.h

function isKernelThread({ flags }: ProcessStat): boolean {
  return (flags & PF_KTHREAD) !== 0;
}

/** The deployment that the process was started in; undefined: none, or this user may not know. */
function markerOf(stat: ProcessStat): string | undefined {
  return MARKER_IN_ENVIRONMENT.exec(environmentOf(stat) ?? '')?.[1];
}

const MARKER_IN_ENVIRONMENT = new RegExp(`(?:^|\\0)${DEPLOYMENT_MARKER}=([^\\0]*)`);

/** Once its main thread has ended, a process shows its environment only through its other threads. */
function environmentOf({ processId, state }: ProcessStat): string | undefined {
  if (state !== 'Z') return readEnvironment(`/proc/${processId}`);
  for (const threadId of threadIds(processId)) {
    const environment = readEnvironment(`/proc/${processId}/task/${threadId}`);
    if (environment) return environment;
  }
  return undefined;
}
