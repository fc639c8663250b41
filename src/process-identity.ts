import { bootId } from './boot-id.ts';
import { readProc } from './proc.ts';

/** Identifies a process for good, as process ids are reused. */
export interface ProcessIdentity {
  processId: number;
  /** Clock ticks since boot: field 22 of /proc/<pid>/stat, proc_pid_stat(5). */
  processStartedAt: number;
  /** /proc/sys/kernel/random/boot_id */
  bootId: string;
}

/** The process that has this id now, zombies included; undefined: there is none. */
export function processIdentity(processId: number): ProcessIdentity | undefined {
  const stat = readStat(processId);
  return stat && identityOf(stat);
}

/** Whether that very process still runs, not another one with its id. */
export function isAlive(identity: ProcessIdentity): boolean {
  const stat = identity.bootId === bootId() ? readStat(identity.processId) : undefined;
  return stat !== undefined && stat.startedAt === identity.processStartedAt && !hasExited(stat);
}

/** What /proc/<id>/stat tells of a process, proc_pid_stat(5). */
export interface ProcessStat {
  processId: number;
  /** Of the program; until execve(2) that of the thread that forked the process. */
  name: string;
  state: string;
  parentId: number;
  groupId: number;
  sessionId: number;
  flags: number;
  threadCount: number;
  startedAt: number;
}

/** The identity of a process, by which it is told from another one with the same id. */
export function identityOf(stat: ProcessStat): ProcessIdentity {
  return { processId: stat.processId, processStartedAt: stat.startedAt, bootId: bootId() };
}

/** A process whose main thread has ended is shown as a zombie while its other threads run. */
export function hasExited({ state, threadCount }: ProcessStat): boolean {
  return (state === 'Z' && threadCount <= 1) || state === 'X';
}

/** A process as it is now, zombies included; undefined: there is none with this id. */
export function readStat(processId: number): ProcessStat | undefined {
  const text = readProc(`/proc/${processId}/stat`);
  if (text === undefined) return undefined;
  // The second field is the name in parentheses, which may itself hold spaces and parentheses.
  const nameEnd = text.lastIndexOf(')');
  const fields = text.slice(nameEnd + 2).split(' ', 36);
  const number = (field: number) => Number(fields[field - 3]);
  // The signal that its parent gets at its end. A thread has none, but is looked up by its id as a process is.
  if (number(38) === -1) return undefined;
  return {
    processId,
    name: text.slice(text.indexOf('(') + 1, nameEnd),
    state: fields[0] ?? '',
    parentId: number(4),
    groupId: number(5),
    sessionId: number(6),
    flags: number(9),
    threadCount: number(20),
    startedAt: number(22),
  };
}
