import { bootId } from '../boot-id.ts';
import { delay, type Effects } from '../effects.ts';
import { newestId, readProc, retryOnShortage } from '../proc.ts';
import {
  identityOf,
  isAlive,
  type ProcessIdentity,
  type ProcessStat,
  processIdentity,
  readStat,
} from '../process-identity.ts';
import { type TerminationDisposition, terminationDisposition, visitProcesses } from './processes.ts';
import { exists, signal } from './signals.ts';

/** The processes of a deployment. `leader` is the command itself, if it is known. */
interface ProcessTree {
  deploymentId: string;
  leader: ProcessIdentity | undefined;
  /** Whether the leader ran until just now, so that no other process can have its id; else that is found out. */
  ownsId?: boolean;
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

/**
 * Ends all processes of a deployment: SIGTERM, the grace, then SIGKILL again and again. Resolves once none of them
 * lives, with what SIGTERM meant to the leader. Besides the leader's process group it reaches every process that
 * carries the deployment's marker, is in the leader's session, or descends from one of those. Out of reach is a process
 * that left its group, its session, its parents and its environment behind.
 */
export async function stopTree(tree: ProcessTree, options: StopOptions): Promise<TerminationDisposition> {
  const { leader } = tree;
  const { graceMs, effects } = options;
  // After a reboot none of them can live, and their ids may belong to other processes.
  if (leader !== undefined && leader.bootId !== bootId()) return 'gone';

  // All are looked up before any is signalled: children of one that ends at once are reparented, and no longer found.
  const members = await retryOnShortage(() => membersOf(tree, effects), effects);
  const found = await retryOnShortage(() => members.find(), effects);
  const disposition =
    leader === undefined ? 'gone' : await retryOnShortage(() => terminationDisposition(leader), effects);
  if (disposition === 'gone' && options.spareWhenExited === true) return disposition;

  const startedAtMs = effects.monotonicMs();
  const group = await retryOnShortage(members.livingGroup, effects);
  const outside = await retryOnShortage(() => targetsOutside(group, found), effects);
  if (group !== undefined) terminate(-group);
  for (const target of outside) terminate(target);
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
  await killUntilGone(members, options);
  return disposition;
}

/** SIGKILL to every process that is found, in rounds: a child that was forked during one is found in the next. */
async function killUntilGone(members: Members, { effects, onStuck }: StopOptions): Promise<void> {
  let before = new Set<string>();
  let stuckRounds = 0;
  let mayKillAll = true;
  for (let round = 0; ; round++) {
    // Where another user's processes start some of this user, one may become the other's just as it is to stop: it could
    // be neither killed nor continued, and who waits for it would wait for ever.
    if (round > 0 && mayKillAll) await retryOnShortage(() => freeze(members), effects);
    const left = await retryOnShortage(() => kill(round === 0), effects);
    if (left === undefined) return;
    // One that was there in the last round does not die: wait. If all are others, they fork faster than they are killed:
    // go on at once.
    const isStuck = left.some((stat) => before.has(keyOf(stat)));
    before = new Set(left.map(keyOf));
    stuckRounds = isStuck ? stuckRounds + 1 : 0;
    if (stuckRounds === STUCK_ROUNDS) onStuck?.(left.map(({ processId }) => processId));
    if (stuckRounds >= BRISK_ROUNDS) await delay(Math.min(1000, 2 ** (stuckRounds - BRISK_ROUNDS)), effects);
  }

  /** The processes that were sent SIGKILL one by one; undefined: none is left. */
  async function kill(isFirst: boolean): Promise<ProcessStat[] | undefined> {
    members.killGroup();
    const killTarget = (target: number) => {
      if (!signal(target, 'SIGKILL')) mayKillAll = false;
    };
    // A script that ignores SIGTERM, or only catches it, began its next step in one kill of five.
    if (isFirst) for (const target of targetsOutside(undefined, await members.find())) killTarget(target);
    const killOne = ({ processId }: ProcessStat) => killTarget(processId);
    const left = await members.find(killOne);
    return left.length === 0 && (await members.areGone(killOne)) ? undefined : left;
  }
}

/**
 * SIGSTOP to all, until a pass finds no other. What is stopped neither forks nor takes the processor, and keeps its place
 * where their number is limited: on a busy machine, 300 processes that forked into sessions of their own took the place
 * of each killed one for as long as they were killed.
 */
async function freeze(members: Members): Promise<void> {
  const frozen = new Set<string>();
  for (let pass = 0; pass < FREEZING_PASSES; pass++) {
    const found = await members.find((stat) => signal(stat.processId, 'SIGSTOP'));
    if (found.every((stat) => frozen.has(keyOf(stat)))) return;
    for (const stat of found) frozen.add(keyOf(stat));
  }
}

const FREEZING_PASSES = 20;
const BRISK_ROUNDS = 20;
/** About 3 s after the first SIGKILL. */
const STUCK_ROUNDS = BRISK_ROUNDS + 12;

interface Members {
  /** The living processes of the tree, newest first. `onFound` gets most of them the moment they are found. */
  find(onFound?: (stat: ProcessStat) => void): Promise<ProcessStat[]>;
  /** The leader's group, if it has a member, be it a zombie, and davit is none. Unlike `find`, this misses none. */
  livingGroup(): number | undefined;
  /** SIGKILL to the leader's group, which reaches processes that `find` may miss. */
  killGroup(): void;
  /** Whether none is left, after so many passes that none can have been missed; `onFound` as above. */
  areGone(onFound?: (stat: ProcessStat) => void): Promise<boolean>;
}

function membersOf({ deploymentId, leader, ownsId }: ProcessTree, effects: Effects): Members {
  const known = new Set<string>();
  // A session and a group have the id of their leader. While they have a member, no other process can be given that id.
  let sessionId =
    leader !== undefined && (ownsId === true || stillOwnsId(leader)) ? leader.processId : undefined;
  let isGroupKilled = false;

  return { find, livingGroup, killGroup, areGone };

  async function find(onFound: (stat: ProcessStat) => void = () => undefined): Promise<ProcessStat[]> {
    const members: ProcessStat[] = [];
    const others: ProcessStat[] = [];
    // Not as soon as it has no member: a pass may have missed one that forks and ends without pause.
    if (sessionId !== undefined && isAnothers(sessionId)) sessionId = undefined;
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
    return members;
  }

  /** Whether another process than the leader has this id by now. */
  function isAnothers(processId: number): boolean {
    const holder = processIdentity(processId);
    return holder !== undefined && holder.processStartedAt !== leader?.processStartedAt;
  }

  function livingGroup(): number | undefined {
    return sessionId !== undefined && sessionId !== ownGroup() && !isAnothers(sessionId) && exists(-sessionId)
      ? sessionId
      : undefined;
  }

  /** All members get it at once, forking or not: fork(2) fails while a signal is pending. */
  function killGroup(): void {
    const group = livingGroup();
    if (group === undefined) return;
    signal(-group, 'SIGKILL');
    isGroupKilled = true;
  }

  async function areGone(onFound?: (stat: ProcessStat) => void): Promise<boolean> {
    const startedAtMs = effects.monotonicMs();
    let newest = newestId();
    let quiet = 0;
    for (let empty = 1; ; empty++) {
      if ((await find(onFound)).length > 0) return false;
      // A pass misses only processes that were forked during it, or were just being forked when it began: the second
      // pass in a row without a fork misses none.
      const newestBefore = newest;
      newest = newestId();
      quiet = newest === newestBefore ? quiet + 1 : 0;
      if (quiet === 2) return true;
      if (empty >= EMPTY_PASSES && effects.monotonicMs() - startedAtMs >= EMPTY_FOR_MS)
        return isGroupKilled || livingGroup() === undefined;
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

function byAge(one: ProcessStat, other: ProcessStat): number {
  return one.startedAt - other.startedAt || one.processId - other.processId;
}

/**
 * What to signal to reach those outside the group, processes or whole groups. Where they are now, just before the group
 * is signalled: one may have left it since it was looked up, as by setsid(1), and gets nothing with it. One that leaves
 * it on that signal has had it.
 *
 * All of a group at once if its leader is among them: when the first program of a pipeline had ended, the last one took
 * its input for complete in one cancellation of five. Without its leader it may be another's, as of a process manager.
 * The oldest first, so that a parent comes before its children: a script of which only the step had ended, under
 * timeout(1), say, began the next.
 */
function targetsOutside(group: number | undefined, stats: ProcessStat[]): Iterable<number> {
  const own = ownGroup();
  const outside = stats.flatMap(({ processId, startedAt }) => {
    const now = readStat(processId);
    return now?.startedAt === startedAt && now.groupId !== group ? [now] : [];
  });
  const ids = new Set(outside.map(({ processId }) => processId));
  const targets = outside
    .toSorted(byAge)
    .map(({ processId, groupId }) => (ids.has(groupId) && groupId !== own ? -groupId : processId));
  return new Set(targets);
}

/** Is not signalled as a whole: a command may have started davit. */
function ownGroup(): number | undefined {
  return readStat(process.pid)?.groupId;
}

function terminate(target: number): void {
  signal(target, 'SIGTERM');
  // A stopped process acts on SIGTERM only when it is continued.
  signal(target, 'SIGCONT');
}

function keyOf(stat: ProcessStat): string {
  return `${stat.processId} ${stat.startedAt}`;
}
