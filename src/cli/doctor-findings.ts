import { type DeploymentId, type ProjectStatus, timestamp } from '../domain.ts';
import { DAY_MS, formatDuration, HOUR_MS, MINUTE_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { codeOf, messageOf } from '../errors.ts';
import { printable } from '../printable.ts';
import { readProc } from '../proc.ts';
import { isAlive, type ProcessIdentity } from '../process-identity.ts';
import type { WaitingDeployment, WebhookBacklog } from '../store/backlog.ts';
import { type Unusable, whatIsWrong } from '../store/check.ts';
import { isFailureOfDisk, isLocked } from '../store/database.ts';
import type { RunningDeployment } from '../store/deployments.ts';
import type { ExaminedFile, KeptTransaction, OlderFile } from '../store/doctor.ts';
import type { Serving } from '../store/lock.ts';
import type { ProjectDetails } from '../store/projects.ts';
import type { Reads } from '../store/store.ts';
import { WAL_LARGE_BYTES } from '../store/wal.ts';
import { DISABLED_BY } from '../store/webhooks.ts';
import { formatBytes } from './bytes.ts';
import { checkDisk, type DiskTrial } from './doctor-disk.ts';
import { checkLeftovers, checkPermissions } from './doctor-files.ts';
import { type FindingOf, isProblem, note, ok, orOk, problem } from './findings.ts';
import { nameOfKey, nameOfProject } from './names.ts';
import { checkTemporaryDirectory, findingsOf } from './project-findings.ts';
import type { Surroundings } from './project-surroundings.ts';
import { isLeft } from './serving.ts';
import { countText, keyExpiredAt } from './webhook-text.ts';

export type DoctorFinding = FindingOf<
  | 'permissions'
  | 'disk'
  | 'integrity'
  | 'schema'
  | 'references'
  | 'wal'
  | 'writes'
  | 'clock'
  | 'service'
  | 'deployments'
  | 'webhooks'
  | 'projects'
  | 'keys'
  | 'leftovers'
>;

/** A file to check, and when. */
export interface Case {
  /** Absolute, and no link. */
  path: string;
  service: Serving | null;
  nowMs: number;
  /** Taken before the file was opened, as opening and closing it empties the WAL. */
  walBytes: number;
  diskTrial: DiskTrial;
}

/** What is looked up before the checks. */
interface LookedUp extends Surroundings {
  /**
   * The living processes of running deployments. The first one need not be among them: others may be being stopped after
   * that has ended.
   */
  livingProcesses: ReadonlyMap<string, readonly ProcessIdentity[]>;
}

/** Clocks that NTP synchronises differ by less. */
const CLOCK_AHEAD_MS = MINUTE_MS;
/** Normally a start, an end or a retry is seconds late at most. */
const OVERDUE_MS = 10 * MINUTE_MS;
const JUST_BEGUN_MS = MINUTE_MS;
const FAILING_FOR_MS = HOUR_MS;
const KEY_EXPIRES_SOON_MS = 14 * DAY_MS;
const KEY_EXPIRED_LATELY_MS = 14 * DAY_MS;

/** Checks what surrounds a file, without opening it: permissions, disk, WAL, leftovers. */
export function findingsOfPlace(file: Case): DoctorFinding[] {
  return [
    ...checkPermissions(file.path),
    ...checkDisk(file.path, file.diskTrial),
    ...(file.service === null ? [checkLeftWal(file)] : []),
    ...checkLeftovers(file.path),
  ];
}

/** Checks a file that can be opened. Reads all of it. */
export function findingsOfFile(
  file: Case,
  examined: ExaminedFile,
  surroundings: LookedUp,
  effects: Effects,
): DoctorFinding[] {
  const { reads, examination } = examined;
  const checks = [
    () => (file.service === null ? [] : [checkServedWal(file, examination.walUncopiedBytes())]),
    () => [checkWrites(file, examination.keptTransaction(effects), surroundings)],
    () => checkIntegrity(examination),
    () => checkReferences(examination),
    () => [checkClock(file, examination)],
    () => [checkService(file)],
    () => checkDeployments(file, reads, surroundings),
    () => checkWebhooks(file, reads),
    () => checkProjects(reads, surroundings),
    () => checkKeys(file, reads),
  ];
  // If a check meets damage, the others are still made.
  return checks.flatMap((check) => {
    try {
      return check();
    } catch (error) {
      return [damage(whatIsWrong(error, file.path))];
    }
  });
}

/** The finding for a file that cannot be read, or only in part. */
export function damage(file: Unusable): DoctorFinding {
  const sentence = file.kind === 'damaged' ? file.problem : 'it is not a davit file any more';
  return problem('integrity', sentence, `keep a copy of the file, then ${RESTORE}`);
}

/**
 * For a file that could not be opened, as another process has it locked, or because of its disk: even to read, SQLite
 * has to create -wal and -shm. Adds a finding of the disk, if `ofPlace` has no problem of it. Throws any other error.
 */
export function findingsOfUnopened(
  { path }: Case,
  error: unknown,
  ofPlace: DoctorFinding[],
): DoctorFinding[] {
  if (isLocked(error)) {
    const locked = problem(
      'writes',
      'another process keeps the file locked, for reading too: davit can do nothing with it',
      `wait if that is a restore, a migration or a start of davit, else end it: 'fuser -v ${path}' shows which processes have the file open`,
    );
    return [locked, ...ofPlace];
  }
  if (ofPlace.some((finding) => finding.check === 'disk' && isProblem(finding))) return ofPlace;
  if (!isFailureOfDisk(error)) throw error;
  const disk = problem(
    'disk',
    `the file cannot be used (${messageOf(error)}, ${codeOf(error)})`,
    'see what the kernel says of the disk (dmesg), and whether a quota is used up',
  );
  return [disk, ...ofPlace];
}

/** For a file of an older davit, whose contents can be checked only once it is migrated. */
export function findingsOfOlder(
  { service }: Case,
  { schemaVersion, damage: found }: OlderFile,
): DoctorFinding[] {
  return [
    found === undefined ? ok('integrity', 'every page and every index is whole') : damage(found),
    problem(
      'schema',
      `an older davit wrote it (schema ${schemaVersion}): its contents were not checked`,
      service === null
        ? "'davit serve' migrates it, or 'davit admin migrate' without starting anything"
        : 'that older davit still serves it: restart the service with this one, which migrates the file',
    ),
  ];
}

const RESTORE = "restore the last backup: 'davit restore --help'";

function checkLeftWal({ walBytes }: Case): DoctorFinding {
  const message = walText(walBytes);
  if (walBytes > WAL_LARGE_BYTES) {
    return problem('wal', message, 'start davit serve and stop it again: that copies it into the file');
  }
  if (walBytes === 0) return ok('wal', message);
  return note('wal', `${message}: the service did not stop cleanly; nothing is lost`, null);
}

/** After a long read the WAL keeps its size until the next write, however much of it is copied by then. */
function checkServedWal({ walBytes }: Case, uncopiedBytes: number): DoctorFinding {
  const message = walText(walBytes);
  if (uncopiedBytes > WAL_LARGE_BYTES) {
    return problem(
      'wal',
      `${message}, of which ${formatBytes(uncopiedBytes)} are not copied into the file`,
      'a program that reads for long holds it up, usually a backup: once that has ended, restart davit serve',
    );
  }
  if (walBytes <= WAL_LARGE_BYTES) return ok('wal', message);
  return note('wal', `${message}: a write makes it short again once no program reads it any more`, null);
}

function walText(walBytes: number): string {
  return `the WAL has ${formatBytes(walBytes)}`;
}

function checkWrites(
  { path }: Case,
  kept: KeptTransaction | undefined,
  { serviceProcessId }: Surroundings,
): DoctorFinding {
  if (kept === undefined) return ok('writes', 'no process keeps a write transaction');
  const { processId } = kept;
  if (processId !== null && processId === serviceProcessId) {
    return problem(
      'writes',
      `the service, process ${processId}, does not come to the end of a commit: its disk hardly answers, or not at all`,
      'see what the kernel says of the disk (dmesg)',
    );
  }
  return problem(
    'writes',
    `${processText(processId)} keeps a write transaction: until it ends, davit answers 503 and starts nothing`,
    processId === null
      ? `end its transaction, or the process: 'fuser -v ${path}-shm' shows which ones have the file open`
      : 'end its transaction, or the process',
  );
}

function processText(processId: number | null): string {
  if (processId === null) return 'another process';
  const name = readProc(`/proc/${processId}/comm`)?.trim();
  return `process ${processId}${name === undefined ? '' : ` (${printable(name)})`}`;
}

function checkIntegrity(examination: ExaminedFile['examination']): DoctorFinding[] {
  const findings = examination
    .integrityProblems()
    .map((sentence) => damage({ kind: 'damaged', problem: sentence }));
  return orOk(findings, 'integrity', 'every page and every index is whole');
}

function checkReferences(examination: ExaminedFile['examination']): DoctorFinding[] {
  const orphans = examination.foreignKeyProblems();
  const miscounted = examination
    .miscountedProjects()
    .map(({ id, counted, waiting }) => `${id} counts ${counted} waiting deployments, but ${waiting} wait`);
  const findings = [...orphans, ...miscounted].map((sentence) => problem('references', sentence, RESTORE));
  return orOk(findings, 'references', 'every row refers to rows that exist');
}

function checkClock({ nowMs }: Case, examination: ExaminedFile['examination']): DoctorFinding {
  const newestMs = examination.newestMs();
  const aheadMs = newestMs - nowMs;
  if (aheadMs <= CLOCK_AHEAD_MS) return ok('clock', `the newest entry is of ${timestamp(newestMs)}`);
  return problem(
    'clock',
    `the newest entry is of ${timestamp(newestMs)}, which is ${formatDuration(aheadMs)} in the future`,
    'the clock is wrong, or was: check it (timedatectl) and let NTP set it',
  );
}

function checkService({ service }: Case): DoctorFinding {
  if (service === null) {
    return note('service', 'no service is running', 'davit serve');
  }
  const { process_id, since } = service;
  const holder = process_id === null ? '' : ` as process ${process_id}`;
  return ok('service', `running${holder}${since === null ? '' : ` since ${since}`}`);
}

function checkDeployments(file: Case, reads: Reads, surroundings: LookedUp): DoctorFinding[] {
  const { waiting } = reads.backlog.all(file.nowMs, 1);
  const running = reads.deployments.running();
  const [next] = waiting.items;
  const findings = [
    ...running.flatMap((deployment) => findingsOfRunning(deployment, file, surroundings)),
    ...findingsOfWaiting(file, reads, running.length === 0 ? next : undefined),
  ];
  return orOk(findings, 'deployments', `${running.length} running, ${waiting.count} waiting`);
}

function findingsOfRunning(
  deployment: RunningDeployment,
  { service, nowMs }: Case,
  { serviceProcessId, livingProcesses }: LookedUp,
): DoctorFinding[] {
  const { id, process, started_at } = deployment;
  const runs = process !== null && isAlive(process);
  if (service === null) {
    return [
      problem(
        'deployments',
        runs
          ? `${id} runs as process ${process.processId}, but no service is running`
          : `${id} is recorded as running, but no service is running`,
        'davit serve: it ends what is left of the deployment, and records it as interrupted',
      ),
    ];
  }
  const living = livingProcesses.get(id) ?? [];
  if (isLeft(deployment, service, nowMs)) {
    const left = new Set([...(runs ? [process] : []), ...living].map(({ processId }) => processId));
    return ageMs(service.since, nowMs) <= JUST_BEGUN_MS ? [] : [findingOfLeft(id, [...left])];
  }
  const lives = runs || living.length > 0;
  if (lives || serviceProcessId === null || ageMs(started_at, nowMs) <= JUST_BEGUN_MS) return [];
  if (process === null) {
    return [
      problem(
        'deployments',
        `${id} has been waiting since ${started_at}, and its command could not be started`,
        `see its log: davit admin deployment logs ${id}`,
      ),
    ];
  }
  return [
    problem('deployments', `${id} is recorded as running, but its process is gone`, 'restart davit serve'),
  ];
}

/** For one that an earlier run of the service left, and that a new one should have ended and recorded by now. */
function findingOfLeft(id: DeploymentId, processIds: number[]): DoctorFinding {
  return problem(
    'deployments',
    `${id}, which an earlier run of the service left, has not ended: until it has, no deployment starts`,
    processIds.length === 0
      ? 'the log of davit serve says which processes cannot be ended, or why the end cannot be recorded'
      : `end what is left of it, as root or its user: kill -9 ${processIds.join(' ')}`,
  );
}

/** `next` is the first that waits, if nothing runs: it should have started. */
function findingsOfWaiting(
  { service, nowMs }: Case,
  reads: Reads,
  next: WaitingDeployment | undefined,
): DoctorFinding[] {
  const waitsIn = (status: ProjectStatus) =>
    reads.projects
      .list()
      .reduce((sum, project) => sum + (project.status === status ? project.queued_count : 0), 0);
  const [startable, paused] = [waitsIn('active'), waitsIn('paused')];
  const findings: DoctorFinding[] = [];
  if (startable > 0 && service === null) {
    findings.push(problem('deployments', `${startable} wait, but no service is running`, 'davit serve'));
  } else if (next?.project_status === 'active' && ageMs(next.created_at, nowMs) > OVERDUE_MS) {
    findings.push(
      problem(
        'deployments',
        `${next.id} has been waiting since ${next.created_at}, though nothing runs`,
        'restart davit serve',
      ),
    );
  }
  if (paused > 0) {
    findings.push(note('deployments', `${paused} wait in paused projects`, 'davit admin project resume'));
  }
  return findings;
}

function checkWebhooks(file: Case, reads: Reads): DoctorFinding[] {
  const webhooks = reads.backlog.webhooks(file.nowMs);
  const findings = webhooks.flatMap((webhook) =>
    webhook.status === 'disabled'
      ? findingOfDisabled(webhook, reads)
      : [...findingsOfExpired(webhook, file), ...findingsOfEnabled(webhook, file)],
  );
  const failing = webhooks.filter(
    (webhook) =>
      webhook.status === 'enabled' && webhook.failing_since !== null && !failsForLong(webhook, file),
  );
  if (failing.length > 0) {
    findings.push(
      note(
        'webhooks',
        `${failing.length} of ${webhooks.length} failing, for less than ${formatDuration(FAILING_FOR_MS)}`,
        'davit admin webhook list',
      ),
    );
  }
  return orOk(findings, 'webhooks', `${webhooks.length} of them, none failing`);
}

function findingOfDisabled(
  { id, status_reason, held_count, created_by }: WebhookBacklog,
  reads: Reads,
): DoctorFinding {
  const message = `${id} is disabled${status_reason === null ? '' : ` (${status_reason})`}`;
  if (held_count === 0) return note('webhooks', message, null);
  const held = `${message}, with ${countText(held_count)} held for it`;
  const enableOrDelete = `davit admin webhook enable ${id}; or davit admin webhook delete ${id}`;
  if (reads.keys.get(created_by.key_id)?.revoked_at !== null) {
    const advice = `davit admin webhook delete ${id}: its key is revoked, so it stays disabled`;
    return problem('webhooks', held, advice);
  }
  return Object.values<string | null>(DISABLED_BY).includes(status_reason)
    ? note('webhooks', held, enableOrDelete)
    : problem('webhooks', held, `fix the receiver, then ${enableOrDelete}`);
}

function findingsOfExpired(webhook: WebhookBacklog, { nowMs }: Case): DoctorFinding[] {
  const expiredAt = keyExpiredAt(webhook, nowMs);
  if (expiredAt === null) return [];
  const { id, created_by } = webhook;
  const key = nameOfKey({ id: created_by.key_id, name: created_by.name });
  return [
    problem(
      'webhooks',
      `${id} gets no new events: its ${key} expired at ${expiredAt}`,
      `register it again with another key, then davit admin webhook delete ${id}`,
    ),
  ];
}

function findingsOfEnabled(webhook: WebhookBacklog, file: Case): DoctorFinding[] {
  const { id, failing_since, consecutive_failures, last_error, due_count, next_attempt_at } = webhook;
  if (failsForLong(webhook, file)) {
    const how = last_error === null ? '' : `, last with ${last_error}`;
    return [
      problem(
        'webhooks',
        `${id} has been failing since ${failing_since}, ${consecutive_failures} times in a row${how}`,
        `davit admin webhook ping ${id}; davit admin webhook deliveries ${id}`,
      ),
    ];
  }
  if (!isOverdue(webhook, file)) return [];
  return [
    problem(
      'webhooks',
      `${id} is behind with ${countText(due_count)}, the first due since ${next_attempt_at}`,
      file.service === null
        ? 'davit serve'
        : 'its receiver is too slow for its events, or davit serve needs a restart',
    ),
  ];
}

/** Also if its deliveries are late because it fails: few attempts are made then, however many wait. */
function failsForLong(webhook: WebhookBacklog, file: Case): boolean {
  const { failing_since } = webhook;
  if (failing_since === null) return false;
  return (
    ageMs(failing_since, file.nowMs) > FAILING_FOR_MS || (file.service !== null && isOverdue(webhook, file))
  );
}

function isOverdue({ next_attempt_at }: WebhookBacklog, { nowMs }: Case): boolean {
  return ageMs(next_attempt_at, nowMs) > OVERDUE_MS;
}

/** The projects whose commands are to be checked; none if the file is damaged there, which `findingsOfFile` reports. */
export function projectsIn(file: Case, reads: Reads): ProjectDetails[] {
  return unlessDamaged(file, () => projectsToCheck(reads));
}

/** The `livingProcesses`; none if the file is damaged. */
export async function livingIn(file: Case, reads: Reads): Promise<LookedUp['livingProcesses']> {
  const running = unlessDamaged(file, () => reads.deployments.running());
  if (running.length === 0) return new Map();
  const { findMarked } = await import('../deploy/processes.ts');
  return findMarked(new Set(running.map(({ id }) => id)));
}

function unlessDamaged<Row>({ path }: Case, read: () => Row[]): Row[] {
  try {
    return read();
  } catch (error) {
    whatIsWrong(error, path);
    return [];
  }
}

function projectsToCheck(reads: Reads): ProjectDetails[] {
  return reads.projects.list().filter(({ status }) => status !== 'archived');
}

function checkProjects(reads: Reads, surroundings: Surroundings): DoctorFinding[] {
  const projects = projectsToCheck(reads);
  const ofAll = checkTemporaryDirectory(projects, surroundings);
  const ofEach = projects.flatMap((project) =>
    findingsOf(project, reads.projects.variables(project.id), surroundings)
      .filter(isProblem)
      .map((finding) => ({ ...finding, message: `${nameOfProject(project)}: ${finding.message}` })),
  );
  const findings = [...ofAll, ...ofEach].map((finding) => ({ ...finding, check: 'projects' as const }));
  return orOk(findings, 'projects', `${projects.length} of them, each command can be started`);
}

function checkKeys({ nowMs }: Case, reads: Reads): DoctorFinding[] {
  const keys = reads.keys.list().filter(({ revoked_at }) => revoked_at === null);
  const live = keys.filter(({ expires_at }) => ageMs(expires_at, nowMs) <= 0);
  const ending = live
    .filter(({ expires_at }) => -ageMs(expires_at, nowMs) < KEY_EXPIRES_SOON_MS)
    .map((key) =>
      problem(
        'keys',
        `${nameOfKey(key)} expires at ${key.expires_at}`,
        'replace it before then: davit admin key create',
      ),
    );
  // A note, as that may be what was meant; but whoever is refused since may not know why.
  const ended = keys
    .filter((key) => !live.includes(key) && ageMs(key.expires_at, nowMs) < KEY_EXPIRED_LATELY_MS)
    .map((key) =>
      note(
        'keys',
        `${nameOfKey(key)} expired at ${key.expires_at}`,
        'replace it if somebody still needs it: davit admin key create',
      ),
    );
  return orOk(
    [...ending, ...ended],
    'keys',
    `${live.length} of them, none expires within ${formatDuration(KEY_EXPIRES_SOON_MS)}`,
  );
}

/** Negative for a time in the future; minus infinity for null, which never comes. */
function ageMs(at: string | null, nowMs: number): number {
  return at === null ? Number.NEGATIVE_INFINITY : nowMs - Date.parse(at);
}
