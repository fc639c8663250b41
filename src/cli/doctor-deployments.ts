import type { DeploymentId, ProjectStatus } from '../domain.ts';
import { DAY_MS, MINUTE_MS } from '../durations.ts';
import { isAlive, type ProcessIdentity } from '../process-identity.ts';
import type { WaitingDeployment } from '../store/backlog.ts';
import type { RunningDeployment } from '../store/deployments.ts';
import type { Reads } from '../store/store.ts';
import { ageMs, type Case, OVERDUE_MS } from './doctor-case.ts';
import { type Finding, note, orOk, problem } from './findings.ts';
import type { Surroundings } from './project-surroundings.ts';
import { isLeft, waitsForResume } from './serving.ts';

/** Looked up before the checks. */
export interface LookedUp extends Surroundings {
  /**
   * The living processes of running deployments. The first one need not be among them: others may be being stopped after
   * that has ended.
   */
  livingProcesses: ReadonlyMap<string, readonly ProcessIdentity[]>;
}

const JUST_BEGUN_MS = MINUTE_MS;
const RESUME = 'davit admin project resume <project>; davit admin queue shows which one';

/** Checks what runs and what waits. */
export function checkDeployments(file: Case, reads: Reads, lookedUp: LookedUp): Finding[] {
  const { waiting, reported } = reads.backlog.all(file.nowMs, 1);
  const running = reads.deployments.running();
  const [next] = waiting.items;
  const findings = [
    ...running.flatMap((deployment) => findingOfRunning(deployment, file, reads, lookedUp) ?? []),
    ...findingsOfWaiting(file, reads, running.length === 0 ? next : undefined),
    ...findingsOfReported(file, reads),
  ];
  const elsewhere = reported.count === 0 ? '' : `, ${reported.count} carried out by other systems`;
  return orOk(findings, 'deployments', `${running.length} running, ${waiting.count} waiting${elsewhere}`);
}

/** Undefined: it runs as it should. */
function findingOfRunning(
  deployment: RunningDeployment,
  { service, nowMs }: Case,
  reads: Reads,
  { serviceProcessId, livingProcesses }: LookedUp,
): Finding | undefined {
  const { id, status, process, started_at } = deployment;
  const runs = process !== null && isAlive(process);
  if (service === null) {
    return problem(
      'deployments',
      runs
        ? `${id} runs as process ${process.processId}, but no service is running`
        : `${id} is recorded as running, but no service is running`,
      `davit serve: it ends what is left of the deployment, and records it as ${status === 'canceling' ? 'canceled' : 'interrupted'}`,
    );
  }
  const living = livingProcesses.get(id) ?? [];
  if (isLeft(deployment, service, serviceProcessId, nowMs)) {
    // Named only where they cannot be those of the service itself.
    const known = serviceProcessId === null ? [] : [...(runs ? [process] : []), ...living];
    const left = new Set(known.map(({ processId }) => processId));
    return ageMs(service.since, nowMs) <= JUST_BEGUN_MS ? undefined : findingOfLeft(id, [...left]);
  }
  const lives = runs || living.length > 0;
  if (lives || serviceProcessId === null || ageMs(started_at, nowMs) <= JUST_BEGUN_MS) return undefined;
  if (waitsForResume(reads, deployment)) {
    const message = `${id} waits to start, as its project is paused`;
    return note('deployments', message, RESUME);
  }
  if (process === null) {
    return problem(
      'deployments',
      `${id} has been waiting since ${started_at}, and its command could not be started`,
      `see its log: davit admin deployment logs ${id}`,
    );
  }
  return problem(
    'deployments',
    `${id} is recorded as running, but its process is gone`,
    'restart davit serve',
  );
}

/** For one that an earlier run of the service left, and that a new one should have ended and recorded by now. */
function findingOfLeft(id: DeploymentId, processIds: number[]): Finding {
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
): Finding[] {
  const waitsIn = (status: ProjectStatus) =>
    reads.projects
      .list()
      .reduce((sum, project) => sum + (project.status === status ? project.queued_count : 0), 0);
  const [startable, paused] = [waitsIn('active'), waitsIn('paused')];
  const findings: Finding[] = [];
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
    findings.push(note('deployments', `${paused} wait in paused projects`, RESUME));
  }
  return findings;
}

/** Those whose worker is lost would stay open for ever, and nothing else tells of them. */
function findingsOfReported({ nowMs }: Case, reads: Reads): Finding[] {
  const count = reads.deployments.reportsAwaitedForEver(nowMs - DAY_MS);
  if (count === 0) return [];
  return [
    note(
      'deployments',
      `${count} of another system, a day old or of archived projects, may stay open for ever`,
      'davit admin queue shows them; davit admin project set --report-timeout ends them',
    ),
  ];
}
