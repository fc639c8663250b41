import { readlinkSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { bootId } from '../boot-id.ts';
import { delay, type Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import type { ProcessIdentity } from '../store/deployments.ts';
import {
  childrenOfMainThread,
  openFilesOf,
  processIds,
  readProc,
  retryOnShortage,
  threadIds,
} from './proc.ts';

/** The processes of a deployment. `leader` is the command itself, if it is known. */
interface ProcessTree {
  deploymentId: string;
  leader: ProcessIdentity | undefined;
}

interface StopOptions {
  /** From SIGTERM to SIGKILL; called again and again, as it may change meanwhile. */
  graceMs(): number;
  effects: Effects;
  /** Signals no process if the leader has exited by itself: what it left running is meant to stay. */
  spareWhenExited?: boolean;
  /** Called once with the processes that SIGKILL has not ended: another user's, or in uninterruptible sleep. */
  onStuck?: ((processIds: number[]) => void) | undefined;
}

/** What SIGTERM does to a process: `gone` when it has exited already, even if it is still a zombie. */
export type TerminationDisposition = 'gone' | 'default' | 'caught' | 'ignored';

/** The variable that children inherit, so that every process of a command is found, even outside its process group. */
export const DEPLOYMENT_MARKER = 'DEPLOY_ID';

/** The number of the PID namespace that this process is in. */
export function ownNamespace(): string {
  return /\d+/.exec(readlinkSync('/proc/self/ns/pid'))?.[0] ?? '0';
}

/** The process that has this id now, zombies included; undefined: there is none. */
export function processIdentity(processId: number): ProcessIdentity | undefined {
  const stat = readStat(processId);
  return stat && identityOf(stat);
}

/** The session of the process that has this id now; undefined: there is none. */
export function sessionOf(processId: number): number | undefined {
  return readStat(processId)?.sessionId;
}

/** Whether that very process still runs, not another one with its id. */
export function isAlive(identity: ProcessIdentity): boolean {
  const stat = identity.bootId === bootId() ? readStat(identity.processId) : undefined;
  return stat !== undefined && stat.startedAt === identity.processStartedAt && !hasExited(stat);
}

/** What SIGTERM would do to that process now. */
export function terminationDisposition(identity: ProcessIdentity): TerminationDisposition {
  if (!isAlive(identity)) return 'gone';
  const status = readProc(`/proc/${identity.processId}/status`) ?? '';
  const isIn = (mask: string) => holdsSignal(status, mask, SIGTERM_NUMBER);
  if (isIn('SigIgn')) return 'ignored';
  // A process that blocks it may accept it by sigwait(3) or signalfd(2), as tini does.
  return isIn('SigCgt') || isIn('SigBlk') ? 'caught' : 'default';
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

/** The other processes that have the file open, as far as this user may look. */
export function holdersOf(path: string): number[] {
  return processIds().filter(
    (processId) => processId !== process.pid && openFilesOf(processId).includes(path),
  );
}

/**
 * Ends all processes of a deployment: SIGTERM, the grace, then SIGKILL again and again. Resolves once none of them
 * lives, with what SIGTERM meant to the leader. Besides the leader's process group it reaches every process that
 * carries the deployment's marker, is in the leader's session, or descends from one of those. Out of reach is a process
 * that left its group, its session, its parents and its environment behind.
 */
export async function stopTree(tree: ProcessTree, options: StopOptions): Promise<TerminationDisposition> {
  const { leader } = tree;
  const { graceMs, effects } = options;
  // Since the machine was booted anew none of them can live, and their ids belong to other processes.
  if (leader !== undefined && leader.bootId !== bootId()) return 'gone';

  // All are looked up before any is signalled: children of one that ends at once are reparented, and no longer found.
  const members = await retryOnShortage(() => membersOf(tree, effects), effects);
  const found = await retryOnShortage(() => members.find(), effects);
  const disposition =
    leader === undefined ? 'gone' : await retryOnShortage(() => terminationDisposition(leader), effects);
  if (disposition === 'gone' && options.spareWhenExited === true) return disposition;

  const startedAtMs = effects.monotonicMs();
  const group = disposition === 'gone' ? undefined : leader?.processId;
  if (group !== undefined) terminate(-group);
  for (const stat of found) {
    if (stat.groupId !== group) await retryOnShortage(() => terminateIfAlive(stat), effects);
  }
  const restMs = () => graceMs() - (effects.monotonicMs() - startedAtMs);
  for (let round = 0; restMs() > 0; round++) {
    // The leader first: it takes one small file, and all of them a pass over /proc.
    const isOver = await retryOnShortage(
      async () => !(leader !== undefined && isAlive(leader)) && (await members.areGone()),
      effects,
    );
    if (isOver) return disposition;
    await delay(Math.max(0, Math.min(restMs(), 5 * 1.5 ** Math.min(round, 7))), effects);
  }
  await killUntilGone(tree, members, options);
  return disposition;
}

const SIGTERM_NUMBER = 15;

/** A mask such as `SigIgn:\t0000000000001000`, proc_pid_status(5). */
function holdsSignal(status: string, mask: string, signalNumber: number): boolean {
  const digits = new RegExp(`^${mask}:\\s*([0-9a-f]+)$`, 'm').exec(status)?.[1] ?? '0';
  return (BigInt(`0x${digits}`) & (1n << BigInt(signalNumber - 1))) !== 0n;
}

/** SIGKILL to every process that is found, in rounds: a child that was forked during one is found in the next. */
async function killUntilGone(
  { leader }: ProcessTree,
  members: Members,
  { effects, onStuck }: StopOptions,
): Promise<void> {
  let before = new Set<string>();
  let stuckRounds = 0;
  for (;;) {
    const left = await retryOnShortage(kill, effects);
    if (left === undefined) return;
    // Always others: they fork faster than they are killed, and the next round must come at once.
    const isStuck = left.some((stat) => before.has(keyOf(stat)));
    before = new Set(left.map(keyOf));
    stuckRounds = isStuck ? stuckRounds + 1 : 0;
    if (stuckRounds === STUCK_ROUNDS) onStuck?.(left.map(({ processId }) => processId));
    if (stuckRounds >= BRISK_ROUNDS) await delay(Math.min(1000, 2 ** (stuckRounds - BRISK_ROUNDS)), effects);
  }

  /** The processes that were sent SIGKILL one by one; undefined: none is left. */
  async function kill(): Promise<ProcessStat[] | undefined> {
    // A signal to the group reaches all its members at once, forking or not: fork(2) fails while a signal is pending.
    // The leader's id names the group as long as it has a member.
    if (leader !== undefined && (isAlive(leader) || members.groupWasSeen())) {
      signal(-leader.processId, 'SIGKILL');
    }
    const killOne = (stat: ProcessStat) => signal(stat.processId, 'SIGKILL');
    const left = await members.find(killOne);
    return left.length === 0 && (await members.areGone(killOne)) ? undefined : left;
  }
}

const BRISK_ROUNDS = 20;
/** About 3 s after the first SIGKILL. */
const STUCK_ROUNDS = BRISK_ROUNDS + 12;

interface Members {
  /** The living processes of the tree, newest first. `onFound` gets most of them the moment they are found. */
  find(onFound?: (stat: ProcessStat) => void): Promise<ProcessStat[]>;
  /** Whether the last `find` found a process of the leader's group. */
  groupWasSeen(): boolean;
  /** Whether none is left, after so many passes that none can have been missed; `onFound` as above. */
  areGone(onFound?: (stat: ProcessStat) => void): Promise<boolean>;
}

function membersOf({ deploymentId, leader }: ProcessTree, effects: Effects): Members {
  const known = new Set<string>();
  // A session has the id of its leader. While the session has a member, no other process can be given that id.
  let sessionId = leader !== undefined && stillOwnsId(leader) ? leader.processId : undefined;
  let groupSeen = false;

  return { find, groupWasSeen: () => groupSeen, areGone };

  async function find(onFound: (stat: ProcessStat) => void = () => undefined): Promise<ProcessStat[]> {
    const members: ProcessStat[] = [];
    const others: ProcessStat[] = [];
    await visitProcesses((stat, marker) => {
      if (stat.startedAt < (leader?.processStartedAt ?? 0)) return;
      // The marker last, as it takes reading another file.
      const isKnown = known.has(keyOf(stat)) || stat.sessionId === sessionId;
      const isMarked = !isKnown && marker() === deploymentId;
      // If one process of the leader's session is marked, the whole session is this deployment's.
      if (isMarked && stat.sessionId === leader?.processId) sessionId = stat.sessionId;
      const belongs = isKnown || isMarked;
      if (belongs) onFound(stat);
      (belongs ? members : others).push(stat);
    });
    for (const stat of descendants(members, others)) {
      if (isAlive(identityOf(stat))) onFound(stat);
      members.push(stat);
    }
    for (const stat of members) known.add(keyOf(stat));
    if (!members.some((stat) => stat.sessionId === sessionId)) sessionId = undefined;
    groupSeen = sessionId !== undefined && members.some((stat) => stat.groupId === sessionId);
    return members;
  }

  async function areGone(onFound?: (stat: ProcessStat) => void): Promise<boolean> {
    const startedAtMs = effects.monotonicMs();
    let newest = newestProcessId();
    let quiet = 0;
    for (let empty = 1; ; empty++) {
      if ((await find(onFound)).length > 0) return false;
      // A pass misses only processes that were forked during it, or were just being forked when it began: the second
      // pass in a row without a fork misses none.
      const newestBefore = newest;
      newest = newestProcessId();
      quiet = newest === newestBefore ? quiet + 1 : 0;
      if (quiet === 2) return true;
      if (empty >= EMPTY_PASSES && effects.monotonicMs() - startedAtMs >= EMPTY_FOR_MS) return true;
    }
  }
}

/**
 * Whether no other process can have been given this one's id: it still has it, or no id was given out twice since the
 * boot, and the PID namespace is not younger than the process, as after the restart of a container.
 */
function stillOwnsId({ processId, processStartedAt }: ProcessIdentity): boolean {
  const first = processIdentity(1);
  if (first !== undefined && processStartedAt < first.processStartedAt) return false;
  const holder = processIdentity(processId);
  return holder === undefined ? noIdWasReused() : holder.processStartedAt === processStartedAt;
}

/** Whether no process id was given out twice since the boot: proc_stat(5) counts all forks. */
export function noIdWasReused(): boolean {
  const forks = /^processes (\d+)$/m.exec(readProc('/proc/stat') ?? '')?.[1];
  const idMax = readProc('/proc/sys/kernel/pid_max');
  return forks !== undefined && idMax !== undefined && Number(forks) < Number(idMax);
}

/**
 * When other processes fork without pause, both must be reached. A process that forks and ends every 50 µs is missed by
 * nine passes in ten, and a pass takes some 3 ms: after eight of them alone a tree was taken for gone that ran on.
 */
const EMPTY_PASSES = 8;
const EMPTY_FOR_MS = 500;

/** Those of `others` that descend from one of `members`. */
function descendants(members: ProcessStat[], others: ProcessStat[]): ProcessStat[] {
  const found: ProcessStat[] = [];
  const parentIds = new Set(members.map(({ processId }) => processId));
  let rest = others;
  for (;;) {
    const next: ProcessStat[] = [];
    for (const stat of rest) {
      if (!parentIds.has(stat.parentId)) {
        next.push(stat);
        continue;
      }
      parentIds.add(stat.processId);
      found.push(stat);
    }
    if (next.length === rest.length) return found;
    rest = next;
  }
}

function terminateIfAlive(stat: ProcessStat): void {
  if (isAlive(identityOf(stat))) terminate(stat.processId);
}

function terminate(target: number): void {
  signal(target, 'SIGTERM');
  // A stopped process acts on SIGTERM only when it is continued.
  signal(target, 'SIGCONT');
}

/** `target` is a process id, or the negative id of a group. One that is gone or another user's is passed over. */
function signal(target: number, name: 'SIGTERM' | 'SIGCONT' | 'SIGKILL'): void {
  try {
    process.kill(target, name);
  } catch (error) {
    const code = codeOf(error);
    if (code !== 'ESRCH' && code !== 'EPERM') throw error;
  }
}

interface ProcessStat {
  processId: number;
  state: string;
  parentId: number;
  groupId: number;
  sessionId: number;
  flags: number;
  threadCount: number;
  startedAt: number;
}

/** Reading a process takes 12 to 26 µs: so many in one turn of the event loop keep it short. */
const PROCESSES_PER_TURN = 64;

/** `marker` reads the process's marker when it is first called. */
type Visit = (stat: ProcessStat, marker: () => string | undefined) => void;

let nextPass: { visits: Visit[]; ended: Promise<void> } | undefined;
let lastEnded: Promise<unknown> = Promise.resolve();

/**
 * Visits the processes that run, but for this one and kernel threads. Newest first: one that forks and exits is met
 * before it has exited. All calls made before a pass begins share it: with one pass for each, fifty trees of ten
 * processes that were ended together took more than the 30 s of a stop.
 */
function visitProcesses(visit: Visit): Promise<void> {
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
  await visitEach(processIds().sort((one, other) => other - one));

  async function visitEach(ids: readonly number[]): Promise<void> {
    for (const [index, processId] of ids.entries()) {
      if (index > 0 && index % PROCESSES_PER_TURN === 0) await nextTurn();
      if (visited.has(processId)) continue;
      visited.add(processId);
      const stat = readStat(processId);
      if (stat === undefined || hasExited(stat) || isKernelThread(stat)) continue;
      const marker = once(() => markerOf(stat));
      for (const visit of visits) visit(stat, marker);
    }
  }
}

function once<Value>(read: () => Value): () => Value {
  let result: { value: Value } | undefined;
  return () => {
    result ??= { value: read() };
    return result.value;
  };
}

/** The process id that was given out last: the fifth field of /proc/loadavg, proc_loadavg(5). */
function newestProcessId(): string | undefined {
  return readProc('/proc/loadavg')?.trim().split(' ').at(-1);
}

function identityOf(stat: ProcessStat): ProcessIdentity {
  return { processId: stat.processId, processStartedAt: stat.startedAt, bootId: bootId() };
}

function keyOf(stat: ProcessStat): string {
  return `${stat.processId} ${stat.startedAt}`;
}

/** A process whose main thread has ended is shown as a zombie while its other threads run. */
function hasExited({ state, threadCount }: ProcessStat): boolean {
  return (state === 'Z' && threadCount <= 1) || state === 'X';
}

const PF_KTHREAD = 0x00200000; // include/linux/sched.h

function isKernelThread({ flags }: ProcessStat): boolean {
  return (flags & PF_KTHREAD) !== 0;
}

function readStat(processId: number): ProcessStat | undefined {
  const text = readProc(`/proc/${processId}/stat`);
  if (text === undefined) return undefined;
  // The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
  const fields = text.slice(text.lastIndexOf(')') + 2).split(' ', 20);
  const number = (field: number) => Number(fields[field - 3]);
  return {
    processId,
    state: fields[0] ?? '',
    parentId: number(4),
    groupId: number(5),
    sessionId: number(6),
    flags: number(9),
    threadCount: number(20),
    startedAt: number(22),
  };
}

/** The deployment that the process was started in; undefined: none, or this user may not know. */
function markerOf(stat: ProcessStat): string | undefined {
  return MARKER_IN_ENVIRONMENT.exec(environmentOf(stat) ?? '')?.[1];
}

const MARKER_IN_ENVIRONMENT = new RegExp(`(?:^|\\0)${DEPLOYMENT_MARKER}=([^\\0]*)`);

/** Once its main thread has ended, a process shows its environment only through its other threads. */
function environmentOf({ processId, state }: ProcessStat): string | undefined {
  if (state !== 'Z') return readProc(`/proc/${processId}/environ`);
  for (const threadId of threadIds(processId)) {
    const environment = readProc(`/proc/${processId}/task/${threadId}/environ`);
    if (environment) return environment;
  }
  return undefined;
}
