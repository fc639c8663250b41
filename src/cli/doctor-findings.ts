import { readdirSync, type Stats, statSync } from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { isAlive } from '../deploy/processes.ts';
import { type ProjectStatus, timestamp } from '../domain.ts';
import { DAY_MS, formatDuration, HOUR_MS, MINUTE_MS } from '../durations.ts';
import { codeOf, messageOf } from '../errors.ts';
import type { WaitingDeployment, WebhookBacklog } from '../store/backlog.ts';
import { type Unusable, whatIsWrong } from '../store/check.ts';
import { isFailureOfDisk } from '../store/database.ts';
import type { RunningDeployment } from '../store/deployments.ts';
import type { ExaminedFile, OlderFile } from '../store/doctor.ts';
import type { Serving } from '../store/lock.ts';
import type { ProjectDetails } from '../store/projects.ts';
import type { Reads } from '../store/store.ts';
import { WAL_LARGE_BYTES } from '../store/wal.ts';
import { formatBytes } from './bytes.ts';
import { checkDisk } from './doctor-disk.ts';
import { type FindingOf, isProblem, note, ok, orOk, problem } from './findings.ts';
import { nameOfKey, nameOfProject } from './names.ts';
import { findingsOf } from './project-findings.ts';
import type { Surroundings } from './project-surroundings.ts';
import { countText } from './webhook-text.ts';

export type DoctorFinding = FindingOf<
  | 'permissions'
  | 'disk'
  | 'integrity'
  | 'schema'
  | 'references'
  | 'wal'
  | 'clock'
  | 'service'
  | 'deployments'
  | 'webhooks'
  | 'projects'
  | 'keys'
  | 'leftovers'
>;

/** A file to look at, and when. */
interface Case {
  /** Absolute, and no link. */
  path: string;
  service: Serving | null;
  nowMs: number;
  /** Before it was opened, as opening and closing takes an old one in. */
  walBytes: number;
}

/** Clocks that NTP keeps differ by less. */
const CLOCK_AHEAD_MS = MINUTE_MS;
/** A start, an end or a retry takes seconds. */
const OVERDUE_MS = 10 * MINUTE_MS;
const JUST_BEGUN_MS = MINUTE_MS;
const FAILING_FOR_MS = HOUR_MS;
const KEY_ENDS_SOON_MS = 14 * DAY_MS;

/** What there is to say of the place of a file, without opening it. */
export function findingsOfPlace(file: Case): DoctorFinding[] {
  return [...checkPermissions(file), checkDisk(file.path), checkWal(file), ...checkLeftovers(file)];
}

/** What there is to say of a file that can be opened. Reads all of it. */
export function findingsOfFile(
  file: Case,
  examined: ExaminedFile,
  surroundings: Surroundings,
): DoctorFinding[] {
  const { reads, examination } = examined;
  const checks = [
    () => checkIntegrity(examination),
    () => checkReferences(examination),
    () => [checkClock(file, examination)],
    () => [checkService(file)],
    () => checkDeployments(file, reads, surroundings),
    () => checkWebhooks(file, reads),
    () => checkProjects(reads, surroundings),
    () => checkKeys(file, reads),
  ];
  // What is damaged keeps nobody from looking at the rest.
  return checks.flatMap((check) => {
    try {
      return check();
    } catch (error) {
      return [damage(whatIsWrong(error, file.path))];
    }
  });
}

/** A file, or a part of it, that cannot be read. */
export function damage(file: Unusable): DoctorFinding {
  const sentence = file.kind === 'damaged' ? file.problem : 'it is not a davit file any more';
  return problem('integrity', sentence, `keep a copy of the file, then ${RESTORE}`);
}

/**
 * SQLite makes -wal and -shm to read: where the disk is at fault, known already or by what SQLite says of it, the place
 * is all that there is to tell of. Throws any other error.
 */
export function findingsOfUnopened(error: unknown, ofPlace: DoctorFinding[]): DoctorFinding[] {
  if (ofPlace.some((finding) => finding.check === 'disk' && isProblem(finding))) return ofPlace;
  if (!isFailureOfDisk(error)) throw error;
  const disk = problem(
    'disk',
    `the file cannot be used (${messageOf(error)}, ${codeOf(error)})`,
    'see what the kernel says of the disk (dmesg), and whether a quota is used up',
  );
  return [disk, ...ofPlace];
}

/** What there is to say of a file of an older davit; what is in it can be asked only once it is migrated. */
export function findingsOfOlder(
  { service }: Case,
  { schemaVersion, damage: found }: OlderFile,
): DoctorFinding[] {
  return [
    found === undefined ? ok('integrity', 'every page and every index is whole') : damage(found),
    problem(
      'schema',
      `an older davit wrote it (schema ${schemaVersion}): what is in it was not looked at`,
      service === null
        ? "'davit serve' migrates it, or 'davit admin migrate' without starting anything"
        : 'that davit serves it still: start the service anew with this one, which migrates the file',
    ),
  ];
}

const RESTORE = "restore the last backup: 'davit restore --help'";

function checkPermissions({ path }: Case): DoctorFinding[] {
  const file = statSync(path);
  const directory = statSync(dirname(path));
  const findings: DoctorFinding[] = [];
  for (const [name, { mode, uid }] of filesBeside(path, file)) {
    const forOwnerAlone = `chmod 600 ${join(dirname(path), name)}`;
    if ((mode & 0o200) === 0) {
      findings.push(
        problem('permissions', `${name} may not be written (mode ${octal(mode)})`, forOwnerAlone),
      );
    }
    if ((mode & 0o077) !== 0) {
      findings.push(problem('permissions', `others may read ${name} (mode ${octal(mode)})`, forOwnerAlone));
    }
    if (uid !== file.uid) {
      findings.push(
        problem(
          'permissions',
          `${name} belongs to another user than ${basename(path)}: the service may not be able to write`,
          `chown --reference=${path} ${join(dirname(path), name)}`,
        ),
      );
    }
  }
  if ((directory.mode & 0o022) !== 0 && (directory.mode & 0o1000) === 0) {
    findings.push(
      problem(
        'permissions',
        `others may replace the file: they may write in ${dirname(path)} (mode ${octal(directory.mode)})`,
        `chmod go-w ${dirname(path)}`,
      ),
    );
  }
  const uid = process.getuid?.();
  if (uid !== file.uid) {
    findings.push(
      note(
        'permissions',
        'the file belongs to another user than the one who asks: commands are looked at with your rights',
        'ask as that user: sudo -u <user> davit doctor',
      ),
    );
  }
  return orOk(findings, 'permissions', 'the file is for its owner alone');
}

/** The file and what SQLite and davit keep beside it. */
function filesBeside(path: string, file: Stats): [name: string, stats: Stats][] {
  const found: [string, Stats][] = [[basename(path), file]];
  for (const side of ['-wal', '-shm', '-lock']) {
    const stats = statSync(path + side, { throwIfNoEntry: false });
    if (stats !== undefined) found.push([basename(path) + side, stats]);
  }
  return found;
}

function checkWal({ service, walBytes }: Case): DoctorFinding {
  const message = `the WAL has ${formatBytes(walBytes)}`;
  if (walBytes > WAL_LARGE_BYTES) {
    return problem(
      'wal',
      message,
      service === null
        ? 'start davit serve and stop it again: that takes it into the file'
        : 'a program that reads for long holds it up, a backup as a rule: when that has ended, restart davit serve',
    );
  }
  if (service === null && walBytes > 0) {
    return note('wal', `${message}: the service did not stop cleanly; nothing is lost`, null);
  }
  return ok('wal', message);
}

/** Restores keep what they replace, and whoever was killed leaves what it began. */
function checkLeftovers({ path }: Case): DoctorFinding[] {
  const directory = dirname(path);
  const kept = readdirSync(directory).filter(
    (name) => name.startsWith(`${basename(path)}.before-`) || name.startsWith('.davit-partial-'),
  );
  if (kept.length === 0) return [];
  const bytes = kept.reduce(
    (sum, name) => sum + (statSync(join(directory, name), { throwIfNoEntry: false })?.size ?? 0),
    0,
  );
  return [
    note(
      'leftovers',
      `${formatBytes(bytes)} are kept from before: ${kept.join(', ')}`,
      'remove them when nobody needs them any more: they hold secrets, too',
    ),
  ];
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
    .map(({ id, counted, waiting }) => `${id} counts ${counted} waiting deployments, and ${waiting} wait`);
  const findings = [...orphans, ...miscounted].map((sentence) => problem('references', sentence, RESTORE));
  return orOk(findings, 'references', 'every row refers to rows that are there');
}

function checkClock({ nowMs }: Case, examination: ExaminedFile['examination']): DoctorFinding {
  const newestMs = examination.newestMs();
  const aheadMs = newestMs - nowMs;
  if (aheadMs <= CLOCK_AHEAD_MS) return ok('clock', `the last that happened is of ${timestamp(newestMs)}`);
  return problem(
    'clock',
    `the file knows of ${timestamp(newestMs)}, which is ${formatDuration(aheadMs)} from now`,
    'the clock is wrong, or was: compare it (timedatectl) and let NTP keep it; retries wait until that time has come',
  );
}

function checkService({ service }: Case): DoctorFinding {
  if (service === null) {
    return note('service', 'no service has the file', 'davit serve');
  }
  const { process_id, since } = service;
  return ok(
    'service',
    process_id === null ? 'one has the file' : `process ${process_id} has the file since ${since}`,
  );
}

function checkDeployments(file: Case, reads: Reads, surroundings: Surroundings): DoctorFinding[] {
  const { waiting } = reads.backlog.all(file.nowMs, 1);
  const running = reads.deployments.running();
  const [next] = waiting.items;
  const findings = [
    ...running.flatMap((deployment) => findingsOfRunning(deployment, file, reads, surroundings)),
    ...findingsOfWaiting(file, reads, running.length === 0 ? next : undefined),
  ];
  return orOk(findings, 'deployments', `${running.length} running, ${waiting.count} waiting`);
}

function findingsOfRunning(
  { id, process }: RunningDeployment,
  { service, nowMs }: Case,
  reads: Reads,
  { serviceProcessId }: Surroundings,
): DoctorFinding[] {
  const runs = process !== null && isAlive(process);
  if (service === null) {
    return [
      problem(
        'deployments',
        runs
          ? `${id} runs as process ${process.processId}, and no service looks after it`
          : `${id} is recorded as running, and no service looks after it`,
        'davit serve: it ends what is left of it, and records it as interrupted',
      ),
    ];
  }
  const startedAt = reads.deployments.existing(id).started_at ?? timestamp(nowMs);
  if (runs || serviceProcessId === null || ageMs(startedAt, nowMs) <= JUST_BEGUN_MS) return [];
  return [
    problem('deployments', `${id} is recorded as running, and its process is gone`, 'restart davit serve'),
  ];
}

/** `next` is the one that should have started by now, as nothing runs. */
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
    findings.push(
      problem('deployments', `${startable} wait, and no service carries them out`, 'davit serve'),
    );
  } else if (next?.project_status === 'active' && ageMs(next.created_at, nowMs) > OVERDUE_MS) {
    findings.push(
      problem(
        'deployments',
        `${next.id} waits since ${next.created_at}, and nothing runs`,
        'restart davit serve',
      ),
    );
  }
  if (paused > 0) {
    findings.push(
      note('deployments', `${paused} wait in projects that are paused`, 'davit admin project resume'),
    );
  }
  return findings;
}

function checkWebhooks(file: Case, reads: Reads): DoctorFinding[] {
  const webhooks = reads.backlog.webhooks(file.nowMs);
  const findings = webhooks.flatMap((webhook) =>
    webhook.status === 'disabled' ? findingOfDisabled(webhook, reads) : findingsOfEnabled(webhook, file),
  );
  const failing = webhooks.filter(
    ({ status, failing_since }) =>
      status === 'enabled' && failing_since !== null && ageMs(failing_since, file.nowMs) <= FAILING_FOR_MS,
  );
  if (failing.length > 0) {
    findings.push(
      note(
        'webhooks',
        `${webhooks.length} of them, ${failing.length} failing now, for less than ${formatDuration(FAILING_FOR_MS)}`,
        'davit admin webhook list',
      ),
    );
  }
  return orOk(findings, 'webhooks', `${webhooks.length} of them, none fails`);
}

function findingOfDisabled(
  { id, status_reason, held_count, created_by }: WebhookBacklog,
  reads: Reads,
): DoctorFinding {
  const message = `${id} is disabled${status_reason === null ? '' : ` (${status_reason})`}`;
  if (held_count === 0) return note('webhooks', message, null);
  const isForEver = reads.keys.get(created_by.key_id)?.revoked_at !== null;
  return problem(
    'webhooks',
    `${message}, with ${countText(held_count)} held for it`,
    isForEver
      ? `davit admin webhook delete ${id}: its key is revoked, so it stays disabled`
      : `mend the receiver, then davit admin webhook enable ${id}; or davit admin webhook delete ${id}`,
  );
}

function findingsOfEnabled(webhook: WebhookBacklog, { service, nowMs }: Case): DoctorFinding[] {
  const { id, failing_since, consecutive_failures, last_error, due_count, next_attempt_at } = webhook;
  if (failing_since !== null && ageMs(failing_since, nowMs) > FAILING_FOR_MS) {
    const how = last_error === null ? '' : `, last with ${last_error}`;
    return [
      problem(
        'webhooks',
        `${id} fails since ${failing_since}, by now ${consecutive_failures} times in a row${how}`,
        `davit admin webhook ping ${id}; davit admin webhook deliveries ${id}`,
      ),
    ];
  }
  if (next_attempt_at === null || ageMs(next_attempt_at, nowMs) <= OVERDUE_MS) return [];
  return [
    problem(
      'webhooks',
      `${id} is behind: ${due_count} deliveries are due, the first since ${next_attempt_at}`,
      service === null ? 'davit serve' : 'its receiver takes less than comes, or davit serve needs a restart',
    ),
  ];
}

/** Those whose commands are to be started; none of a file that is damaged there, which `findingsOfFile` tells. */
export function projectsIn({ path }: Case, reads: Reads): ProjectDetails[] {
  try {
    return projectsToCheck(reads);
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
  const findings = projects.flatMap((project) =>
    findingsOf(project, reads.projects.variables(project.id), surroundings)
      .filter(isProblem)
      .map(({ level, message, advice }) => ({
        check: 'projects' as const,
        level,
        message: `${nameOfProject(project)}: ${message}`,
        advice,
      })),
  );
  return orOk(findings, 'projects', `${projects.length} of them, each command can be started`);
}

function checkKeys({ nowMs }: Case, reads: Reads): DoctorFinding[] {
  const live = reads.keys
    .list()
    .filter(({ revoked_at, expires_at }) => revoked_at === null && ageMs(expires_at, nowMs) <= 0);
  const findings = live
    .filter(({ expires_at }) => -ageMs(expires_at, nowMs) < KEY_ENDS_SOON_MS)
    .map((key) =>
      problem(
        'keys',
        `${nameOfKey(key)} ends at ${key.expires_at}`,
        'give whoever uses it a new one before: davit admin key create',
      ),
    );
  return orOk(
    findings,
    'keys',
    `${live.length} of them, none ends within ${formatDuration(KEY_ENDS_SOON_MS)}`,
  );
}

/** Less than nothing for what is to come; for what never comes, as far from now as can be. */
function ageMs(at: string | null, nowMs: number): number {
  return at === null ? Number.NEGATIVE_INFINITY : nowMs - Date.parse(at);
}

function octal(mode: number): string {
  return (mode & 0o7777).toString(8);
}
