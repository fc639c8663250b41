import { userInfo } from 'node:os';
import type { Command } from 'commander';
import { absolutePath, statusOf } from '../paths.ts';
import { quoteForBash } from '../shell-words.ts';
import type { ProjectDetails } from '../store/projects.ts';
import { type CommandContext, explain, jsonOption } from './command.ts';
import { dbPathOf, withStore } from './database-file.ts';
import { type Finding, findingsText, isProblem, note, ok, refuseProblems } from './findings.ts';
import { nameOfProject, PROJECT_ARGUMENT, resolveProject } from './names.ts';
import { checkTemporaryDirectory } from './project-files.ts';
import { findingsOf } from './project-findings.ts';
import { type Surroundings, surroundingsOf } from './project-surroundings.ts';
import { printJson } from './results.ts';
import { serviceOf } from './serving.ts';
import { nameOfUser } from './users.ts';

/** `davit admin project check`. */
export function defineCheckProject(command: Command, context: CommandContext): void {
  explain(
    command.summary('check that its command can be started and its settings make sense'),
    'Looks for what would make a deployment fail: the directory, the command and the interpreter in its first line, a ' +
      'temporary directory without room, the variables and the limits, as they are now, with the rights of the current ' +
      'user: run it as the user of the service. Does not run the command. Exit code 1 if something needs attention.',
    [
      'davit admin project check website',
      'sudo -u davit davit admin project check website --db /var/lib/davit/davit.db',
    ],
  )
    .argument(...PROJECT_ARGUMENT)
    .addOption(jsonOption())
    .action((text: string, options: { json?: boolean }) => checkProject(command, text, options, context));
}

async function checkProject(
  command: Command,
  text: string,
  options: { json?: boolean },
  context: CommandContext,
): Promise<void> {
  const { project, findings } = await withStore(command, context, 'refuse', async (store) => {
    const found = resolveProject(store, text);
    const variables = store.reads.projects.variables(found.id);
    const dbPath = dbPathOf(command);
    const service = await serviceOf(command);
    const surroundings = await surroundingsOf([found], { dbPath, service }, context.effects);
    return {
      project: found,
      findings: [
        checkUser(found, dbPath, surroundings),
        ...checkTemporaryDirectory([found], surroundings),
        ...findingsOf(found, variables, surroundings),
      ],
    };
  });
  if (options.json === true) {
    const { id, name } = project;
    const checked_as = userName();
    printJson(context, {
      project_id: id,
      project_name: name,
      checked_as,
      ok: !findings.some(isProblem),
      findings,
    });
  } else {
    context.terminal.print(`${nameOfProject(project)}\n${findingsText(findings, context.terminal)}`);
  }
  refuseProblems(findings, context.terminal);
}

/** Whether this user is not that of the service, and may have other rights. */
function checkUser(project: ProjectDetails, dbPath: string, { serviceProcessId }: Surroundings): Finding {
  const uid = process.getuid?.();
  const serviceUid = serviceProcessId === null ? undefined : statusOf(`/proc/${serviceProcessId}`)?.uid;
  const otherUid = serviceUid ?? statusOf(dbPath)?.uid;
  const message = `checked as ${userName()}`;
  if (uid === undefined || otherUid === undefined || otherUid === uid) {
    return ok('user', message);
  }
  const other = nameOfUser(otherUid);
  const why = serviceUid === undefined ? `the file belongs to ${other}` : `the service runs as ${other}`;
  return note(
    'user',
    `${message}, and ${why}, who may have other rights`,
    // sudo takes DAVIT_DB away.
    `sudo -u ${other} davit admin project check ${project.id} --db ${quoteForBash(absolutePath(dbPath))}`,
  );
}

function userName(): string {
  try {
    return userInfo().username;
  } catch {
    return `user ${process.getuid?.()}`; // a user without an entry, usually in a container
  }
}
