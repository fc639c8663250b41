import { variableProblem } from '../deploy/environment.ts';
import { formatDuration } from '../durations.ts';
import type { ProjectDetails } from '../store/projects.ts';
import { type Finding, note, ok, orOk, problem } from './findings.ts';
import { checkFiles } from './project-files.ts';
import type { Surroundings } from './project-surroundings.ts';

/**
 * Checks a project's settings, and the files that they name, as they are now and with the rights of this process. Runs
 * nothing. Shows the names of variables, never their values.
 */
export function findingsOf(
  project: ProjectDetails,
  variables: Readonly<Record<string, string>>,
  surroundings: Surroundings,
): Finding[] {
  const { command } = project;
  return [
    checkStatus(project),
    ...(command === null ? [NO_COMMAND] : checkFiles(project, command, variables, surroundings)),
    ...checkVariables(project, variables),
    command === null ? checkReportTimeout(project) : checkTimeouts(project),
  ];
}

const NO_COMMAND = ok('command', 'none: another system does the work and reports it');

function checkStatus({ id, status }: ProjectDetails): Finding {
  const resume = `davit admin project resume ${id}`;
  switch (status) {
    case 'active':
      return ok('status', 'active');
    case 'paused':
      return note('status', 'paused: its deployments wait', resume);
    case 'archived':
      return note('status', 'archived: it accepts no deployments', resume);
    default:
      return status satisfies never;
  }
}

function checkVariables(project: ProjectDetails, variables: Readonly<Record<string, string>>): Finding[] {
  const names = Object.keys(variables);
  const findings = Object.entries(variables).flatMap(([name, value]): Finding[] => {
    const found = variableProblem(name, value);
    return found === undefined
      ? []
      : [
          problem(
            'variables',
            `${name} ${found}`,
            `davit admin project set ${project.id} --unset-env ${name}`,
          ),
        ];
  });
  return orOk(findings, 'variables', names.join(' ') || 'none');
}

/** A command that is stopped sooner can hardly do its work. */
const SHORT_TIMEOUT_MS = 5_000;

function checkTimeouts(project: ProjectDetails): Finding {
  const { id, timeout_ms, idle_timeout_ms } = project;
  const set = `davit admin project set ${id}`;
  if (timeout_ms === null && idle_timeout_ms === null) {
    return note(
      'limits',
      'none: a command that hangs blocks all later deployments of the project',
      `${set} --timeout 30m`,
    );
  }
  const timeout = timeout_ms === null ? 'off' : formatDuration(timeout_ms);
  const idleTimeout = idle_timeout_ms === null ? 'off' : formatDuration(idle_timeout_ms);
  if (timeout_ms !== null && idle_timeout_ms !== null && idle_timeout_ms >= timeout_ms) {
    return problem(
      'limits',
      `the idle timeout (${idleTimeout}) has no effect, as the timeout (${timeout}) is not longer`,
      `${set} --idle-timeout, with less than ${timeout} or off`,
    );
  }
  const shortest = Math.min(
    timeout_ms ?? Number.POSITIVE_INFINITY,
    idle_timeout_ms ?? Number.POSITIVE_INFINITY,
  );
  const message = `timeout ${timeout}, idle timeout ${idleTimeout}`;
  return shortest < SHORT_TIMEOUT_MS
    ? note('limits', `${message}: very short`, `${set} --timeout 30m`)
    : ok('limits', message);
}

function checkReportTimeout({ id, report_timeout_ms }: ProjectDetails): Finding {
  if (report_timeout_ms !== null) return ok('limits', `report timeout ${formatDuration(report_timeout_ms)}`);
  return note(
    'limits',
    'none: a deployment whose end is never reported stays open for ever',
    `davit admin project set ${id} --report-timeout 2h`,
  );
}
