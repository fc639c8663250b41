import { findMarked } from '../deploy/processes.ts';
import { timestamp } from '../domain.ts';
import { formatDuration, MINUTE_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { codeOf, messageOf } from '../errors.ts';
import { type Unusable, whatIsWrong } from '../store/check.ts';
import type { ExaminedFile, OlderFile } from '../store/doctor.ts';
import { servedWithoutLock } from '../store/holder.ts';
import type { ProjectDetails } from '../store/projects.ts';
import { isFailureOfDisk, isLocked } from '../store/sqlite-errors.ts';
import type { Reads } from '../store/store.ts';
import type { Case } from './doctor-case.ts';
import { checkDeployments, type LookedUp } from './doctor-deployments.ts';
import { checkDisk } from './doctor-disk.ts';
import { checkLeftovers, checkPermissions } from './doctor-files.ts';
import { checkKeys } from './doctor-keys.ts';
import { checkLeftWal, checkServedWal, checkWrites, fuser } from './doctor-wal.ts';
import { checkWebhooks } from './doctor-webhooks.ts';
import { type Finding, isProblem, note, ok, orOk, problem } from './findings.ts';
import { nameOfProject } from './names.ts';
import { checkTemporaryDirectory } from './project-files.ts';
import { findingsOf } from './project-findings.ts';
import { type Surroundings, surroundingsOf } from './project-surroundings.ts';

/** Clocks that NTP synchronises differ by less. */
const CLOCK_AHEAD_MS = MINUTE_MS;

/** Checks what surrounds a file, without opening it: permissions, disk, WAL, leftovers. */
export function findingsOfPlace(file: Case): Finding[] {
  return [
    ...checkPermissions(file),
    ...checkDisk(file.path, file.diskTrial),
    ...(file.service === null ? [checkLeftWal(file)] : []),
    ...checkLeftovers(file),
  ];
}

/** What the checks need and has to be waited for; nothing of rows that are damaged, which `findingsOfFile` reports. */
export async function lookUp(file: Case, reads: Reads, effects: Effects): Promise<LookedUp> {
  const { path: dbPath, service } = file;
  const projects = unlessDamaged(file, () => projectsToCheck(reads));
  const surroundings = await surroundingsOf(projects, { dbPath, service }, effects);
  const running = unlessDamaged(file, () => reads.deployments.running());
  const livingProcesses: LookedUp['livingProcesses'] =
    running.length === 0 ? new Map() : await findMarked(new Set(running.map(({ id }) => id)));
  return { ...surroundings, livingProcesses };
}

function unlessDamaged<Row>({ path }: Case, read: () => Row[]): Row[] {
  try {
    return read();
  } catch (error) {
    whatIsWrong(error, path);
    return [];
  }
}

/** Checks a file that can be opened. Reads all of it. */
export function findingsOfFile(
  file: Case,
  examined: ExaminedFile,
  lookedUp: LookedUp,
  effects: Effects,
): Finding[] {
  const { reads, examination } = examined;
  const checks = [
    () => (examination.isWalWhole() ? [] : [cutShort('wal', file)]),
    () => (file.service === null ? [] : [checkServedWal(file, examination.walUncopiedBytes())]),
    () => [checkWrites(file, examination.keptTransaction(effects), lookedUp)],
    () => checkIntegrity(examination),
    () => checkReferences(examination),
    () => [checkClock(file, examination)],
    () => [checkService(file)],
    () => checkDeployments(file, reads, lookedUp),
    () => checkWebhooks(file, reads),
    () => checkProjects(reads, lookedUp),
    () => checkKeys(file, reads),
  ];
  // If a check meets damage, the others are still made.
  const findings = checks.flatMap((check) => {
    try {
      return check();
    } catch (error) {
      return [damage(whatIsWrong(error, file.path))];
    }
  });
  // They may meet the same damage.
  return [...new Map(findings.map((finding) => [`${finding.check} ${finding.message}`, finding])).values()];
}

/** The finding for a file that cannot be read, or only in part. */
export function damage(file: Unusable): Finding {
  const sentence = file.kind === 'damaged' ? file.problem : 'it is not a davit file any more';
  return problem('integrity', sentence, `keep a copy of the file, then ${RESTORE}`);
}

/**
 * For a file that could not be opened or read, as another process has it locked, or because of its disk: even to read,
 * SQLite has to create -wal and -shm. Adds a finding of the disk, if `ofPlace` has no problem of it. Throws any other
 * error.
 */
export function findingsOfUnopened(file: Case, error: unknown, ofPlace: Finding[]): Finding[] {
  if (isLocked(error)) {
    const locked = problem(
      'writes',
      'another process keeps the file locked, for reading too: davit can do nothing with it',
      `wait if that is a restore, a migration or a start of davit, else end it: ${fuser(file.path)} shows which processes have the file open`,
    );
    return [locked, ...ofPlace];
  }
  if (ofPlace.some((finding) => finding.check === 'disk' && isProblem(finding))) return ofPlace;
  if (!isFailureOfDisk(error)) throw error;
  if (codeOf(error) === 'SQLITE_IOERR_SHORT_READ') return [cutShort('integrity', file), ...ofPlace];
  const disk = problem(
    'disk',
    `the file cannot be used (${messageOf(error)}, ${codeOf(error)})`,
    'see what the kernel says of the disk (dmesg), and whether a quota is used up',
  );
  return [disk, ...ofPlace];
}

function cutShort(check: 'integrity' | 'wal', { path }: Case): Finding {
  return problem(
    check,
    'the file or its -wal was cut short while a program had it open: what only it had is lost',
    `end davit and whatever else has the file open (${fuser(`${path}-shm`)} shows it), then start davit, which goes on with what is left, and see whether davit doctor finds it whole`,
  );
}

/** For a file of an older davit, whose contents can be checked only once it is migrated. */
export function findingsOfOlder({ service }: Case, { schemaVersion, damage: found }: OlderFile): Finding[] {
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

function checkIntegrity(examination: ExaminedFile['examination']): Finding[] {
  const findings = examination
    .integrityProblems()
    .map((sentence) => damage({ kind: 'damaged', problem: sentence }));
  return orOk(findings, 'integrity', 'every page and every index is whole');
}

function checkReferences(examination: ExaminedFile['examination']): Finding[] {
  const orphans = examination.foreignKeyProblems();
  const miscounted = examination
    .miscountedProjects()
    .map(({ id, counted, waiting }) => `${id} counts ${counted} waiting deployments, but ${waiting} wait`);
  const findings = [...orphans, ...miscounted].map((sentence) => problem('references', sentence, RESTORE));
  return orOk(findings, 'references', 'every row refers to rows that exist');
}

function checkClock({ nowMs }: Case, examination: ExaminedFile['examination']): Finding {
  const newestMs = examination.newestMs();
  const aheadMs = newestMs - nowMs;
  if (aheadMs <= CLOCK_AHEAD_MS) return ok('clock', `the newest entry is of ${timestamp(newestMs)}`);
  return problem(
    'clock',
    `the newest entry is of ${timestamp(newestMs)}, which is ${formatDuration(aheadMs)} in the future`,
    'the clock is wrong, or was: check it (timedatectl) and let NTP set it',
  );
}

function checkService({ path, service }: Case): Finding {
  if (service === null) {
    return note('service', 'no service is running', 'davit serve, or systemctl start davit');
  }
  const withoutLock = servedWithoutLock(path);
  if (withoutLock !== undefined) {
    return problem(
      'service',
      `running as process ${withoutLock}, whose lock file was removed: a second service in another container would not be refused`,
      'restart davit serve, which makes the lock file again',
    );
  }
  const { process_id, since } = service;
  const holder = process_id === null ? '' : ` as process ${process_id}`;
  return ok('service', `running${holder}${since === null ? '' : ` since ${since}`}`);
}

function projectsToCheck(reads: Reads): ProjectDetails[] {
  return reads.projects.list().filter(({ status }) => status !== 'archived');
}

function checkProjects(reads: Reads, surroundings: Surroundings): Finding[] {
  const projects = projectsToCheck(reads);
  const ofAll = checkTemporaryDirectory(projects, surroundings);
  const ofEach = projects.flatMap((project) =>
    findingsOf(project, reads.projects.variables(project.id), surroundings)
      .filter(isProblem)
      .map((finding) => ({ ...finding, message: `${nameOfProject(project)}: ${finding.message}` })),
  );
  const findings = [...ofAll, ...ofEach].map((finding): Finding => ({ ...finding, check: 'projects' }));
  const startable = projects.some(({ command }) => command !== null) ? ', each command can be started' : '';
  return orOk(findings, 'projects', `${projects.length} of them${startable}`);
}
