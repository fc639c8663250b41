import { readlinkSync } from 'node:fs';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { bootId } from '../boot-id.ts';
import { delay, type Effects } from '../effects.ts';
import { codeOf } from '../errors.ts';
import type { ProcessIdentity } from '../store/deployments.ts';
import { childrenOfMainThread, openFilesOf, processIds, readProc, threadIds, untilSeen } from './proc.ts';

/** All that a deployment's command started and left: `leader` is the command itself, if it is known. */
interface ProcessTree {
  deploymentId: string;
  leader: ProcessIdentity | undefined;
}

interface StopOptions {
  /** From SIGTERM to SIGKILL; asked again and again meanwhile. */
  graceMs(): number;
  effects: Effects;
  /** Signals nobody when the leader exited of its own accord: what it left running is meant to stay. */
  spareWhenExited?: boolean;
  /** Hears once which processes SIGKILL has not ended: another user's, or stuck inside the kernel. */
  onStuck?: ((processIds: number[]) => void) | undefined;
}

/** What SIGTERM does to a process: `gone` when it has exited already, also when nobody has waited for it yet. */
export type TerminationDisposition = 'gone' | 'default' | 'caught' | 'ignored';

/** Every process of a command carries it, as children inherit it: how those that left its group are found. */
export const DEPLOYMENT_MARKER = 'DEPLOY_ID';

/** In which PID namespace this process is, by its number. */
export function ownNamespace(): string {
  return /\d+/.exec(readlinkSync('/proc/self/ns/pid'))?.[0] ?? '0';
}

/** Who has this id now, also when it has exited and nobody has waited for it; undefined when nobody has. */
export function processIdentity(processId: number): ProcessIdentity | undefined {
  const stat = readStat(processId);
  return stat && identityOf(stat);
}

/** The session of whoever has this id now; undefined when nobody has. */
export function sessionOf(processId: number): number | undefined {
  return readStat(processId)?.sessionId;
}

/** Whether that very process still runs. */
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
  // Who blocks it may take it otherwise, sigwait(3) and signalfd(2), as tini does.
  return isIn('SigCgt') || isIn('SigBlk') ? 'caught' : 'default';
}

/** The processes that carry the marker of one of these deployments, since they were started: one pass over /proc. */
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
 * Ends all of a deployment: SIGTERM, the grace, SIGKILL, again and again until nothing of it lives. Resolves
 * then, and not before, with what SIGTERM meant to the leader. Besides the leader's process group it reaches
 * whoever carries the deployment's marker, is in the leader's session, or descends from one of those; a
 * process that left its group, its session, its parents and its environment behind is out of reach.
 */
export async function stopTree(tree: ProcessTree, options: StopOptions): Promise<TerminationDisposition> {
  const { leader } = tree;
  const { graceMs, effects } = options;
  // After another boot nothing of it can live, and the ids of the old one mean somebody else.
  if (leader !== undefined && leader.bootId !== bootId()) return 'gone';

  // Everybody is looked up before anybody is told: children of who ends at once are strangers' children then.
  const members = await untilSeen(() => membersOf(tree, effects), effects);
  const found = await untilSeen(() => members.find(), effects);
  const disposition =
    leader === undefined ? 'gone' : await untilSeen(() => terminationDisposition(leader), effects);
  if (disposition === 'gone' && options.spareWhenExited === true) return disposition;

  const startedAtMs = effects.monotonicMs();
  const group = disposition === 'gone' ? undefined : leader?.processId;
  if (group !== undefined) terminate(-group);
  for (const stat of found) {
    if (stat.groupId !== group) await untilSeen(() => terminateIfAlive(stat), effects);
  }
  const restMs = () => graceMs() - (effects.monotonicMs() - startedAtMs);
  for (let look = 0; restMs() > 0; look++) {
    // Looking for the leader is one small file, looking for all is a pass over /proc.
    const isOver = await untilSeen(
      async () => !(leader !== undefined && isAlive(leader)) && (await members.areGone()),
      effects,
    );
    if (isOver) return disposition;
    await delay(Math.max(0, Math.min(restMs(), 5 * 1.5 ** Math.min(look, 7))), effects);
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

/** SIGKILL to whatever is found, over and over: a process that forks while we look is met in the next round. */
async function killUntilGone(
  { leader }: ProcessTree,
  members: Members,
  { effects, onStuck }: StopOptions,
): Promise<void> {
  let before = new Set<string>();
  let stuckRounds = 0;
  for (;;) {
    const left = await untilSeen(kill, effects);
    if (left === undefined) return;
    // As long as it is always others, somebody is running from us: then at once again.
    const isStuck = left.some((stat) => before.has(keyOf(stat)));
    before = new Set(left.map(keyOf));
    stuckRounds = isStuck ? stuckRounds + 1 : 0;
    if (stuckRounds === STUCK_ROUNDS) onStuck?.(left.map(({ processId }) => processId));
    if (stuckRounds >= BRISK_ROUNDS) await delay(Math.min(1000, 2 ** (stuckRounds - BRISK_ROUNDS)), effects);
  }

  /** Whom SIGKILL was sent to one by one; undefined: nobody is left. */
  async function kill(): Promise<ProcessStat[] | undefined> {
    // One signal to the group reaches all of it at once, whatever forks meanwhile: fork(2) fails for who has a
    // signal to take. The leader's id names that group as long as it has a member.
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
  /** Who lives of the tree, newest first; `onFound` hears of most of them at the moment they are met. */
  find(onFound?: (stat: ProcessStat) => void): Promise<ProcessStat[]>;
  /** Whether the last `find` met somebody of the leader's group. */
  groupWasSeen(): boolean;
  /** Whether nobody is left, looked at so often that nobody can have slipped through; `onFound` as above. */
  areGone(onFound?: (stat: ProcessStat) => void): Promise<boolean>;
}

function membersOf({ deploymentId, leader }: ProcessTree, effects: Effects): Members {
  const known = new Set<string>();
  // A session's number is its leader's id. It is ours until the session was seen empty: only then can another
  // process get the number.
  let sessionId = leader !== undefined && keepsNumber(leader) ? leader.processId : undefined;
  let groupSeen = false;

  return { find, groupWasSeen: () => groupSeen, areGone };

  async function find(onFound: (stat: ProcessStat) => void = () => undefined): Promise<ProcessStat[]> {
    const members: ProcessStat[] = [];
    const others: ProcessStat[] = [];
    await visitProcesses((stat, marker) => {
      if (stat.startedAt < (leader?.processStartedAt ?? 0)) return;
      // The marker last: it is another file to read.
      const isKnown = known.has(keyOf(stat)) || stat.sessionId === sessionId;
      const isMarked = !isKnown && marker() === deploymentId;
      // Where one of a session is marked, all of it is ours.
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
      // A pass misses only who was born meanwhile, or was about to be when it began: the second without a birth is exact.
      const newestBefore = newest;
      newest = newestProcessId();
      quiet = newest === newestBefore ? quiet + 1 : 0;
      if (quiet === 2) return true;
      if (empty >= EMPTY_PASSES && effects.monotonicMs() - startedAtMs >= EMPTY_FOR_MS) return true;
    }
  }
}

/**
 * Whether nobody else can have got its id: it has it itself, or ids have not begun anew since the machine was booted, nor
 * with a PID namespace that is younger, as that of a container that was started again.
 */
function keepsNumber({ processId, processStartedAt }: ProcessIdentity): boolean {
  const first = processIdentity(1);
  if (first !== undefined && processStartedAt < first.processStartedAt) return false;
  const holder = processIdentity(processId);
  return holder === undefined ? idsAreUnused() : holder.processStartedAt === processStartedAt;
}

/** Whether the system has not given any id out twice: proc_stat(5) counts all that were born. */
export function idsAreUnused(): boolean {
  const born = /^processes (\d+)$/m.exec(readProc('/proc/stat') ?? '')?.[1];
  const idMax = readProc('/proc/sys/kernel/pid_max');
  return born !== undefined && idMax !== undefined && Number(born) < Number(idMax);
}

/**
 * Where others are born without pause. Who forks and ends every 50 µs is missed by nine passes in ten, and a pass takes
 * some 3 ms: eight of them took a tree for gone that ran on.
 */
const EMPTY_PASSES = 8;
const EMPTY_FOR_MS = 500;

/** Those of `others` whose parent is one of `members`, or one of these again. */
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
  // Who is stopped takes SIGTERM only when it goes on.
  signal(target, 'SIGCONT');
}

/** `target` is a process id, or the negative id of a group. Who is gone or belongs to another user is passed over. */
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

/** A process costs 12 to 26 µs to read: this many at a time keep the turns of the event loop short. */
const PROCESSES_PER_TURN = 64;

/** `marker` reads the process's marker when it is asked first. */
type Visit = (stat: ProcessStat, marker: () => string | undefined) => void;

let nextPass: { visits: Visit[]; ended: Promise<void> } | undefined;
let lastEnded: Promise<unknown> = Promise.resolve();

/**
 * Visits the processes that run, newest first: one that forks and leaves is met before it has left. Not this process,
 * and no kernel threads. All who ask before a pass has begun share it: with one for each, fifty trees of ten
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
  await nextTurn(); // whom that has served may want the next at once
  nextPass = undefined;
  const visited = new Set<number>([process.pid]);
  // Whoever forks and ends at once has come here by then; in a list of all it is met by one pass in a hundred.
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

/** The id that was given out last: the fifth field of /proc/loadavg, proc_loadavg(5). */
function newestProcessId(): string | undefined {
  return readProc('/proc/loadavg')?.trim().split(' ').at(-1);
}

function identityOf(stat: ProcessStat): ProcessIdentity {
  return { processId: stat.processId, processStartedAt: stat.startedAt, bootId: bootId() };
}

function keyOf(stat: ProcessStat): string {
  return `${stat.processId} ${stat.startedAt}`;
}

/** A process whose first thread has ended looks like a zombie while its other threads run. */
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

/** The deployment that it was started in; undefined when it was in none, or may not be known. */
function markerOf(stat: ProcessStat): string | undefined {
  return MARKER_IN_ENVIRONMENT.exec(environmentOf(stat) ?? '')?.[1];
}

const MARKER_IN_ENVIRONMENT = new RegExp(`(?:^|\\0)${DEPLOYMENT_MARKER}=([^\\0]*)`);

/** Once its first thread has ended a process has none of its own: its other threads still show it. */
function environmentOf({ processId, state }: ProcessStat): string | undefined {
  if (state !== 'Z') return readProc(`/proc/${processId}/environ`);
  for (const threadId of threadIds(processId)) {
    const environment = readProc(`/proc/${processId}/task/${threadId}/environ`);
    if (environment) return environment;
  }
  return undefined;
}
