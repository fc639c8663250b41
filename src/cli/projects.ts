import type { Command } from 'commander';
import { formatDuration } from '../durations.ts';
import { option } from '../options.ts';
import { singleQuoted } from '../shell-words.ts';
import type { ProjectDetails } from '../store/projects.ts';
import { type CommandContext, explain, jsonOption } from './command.ts';
import { type ConfirmedOptions, confirm } from './confirm.ts';
import { counted } from './counted.ts';
import { withStore } from './database-file.ts';
import { exactMoment, moment } from './moments.ts';
import { nameOfProject, PROJECT_ARGUMENT, resolveProject, warnOfNamesakes } from './names.ts';
import { defineCheckProject } from './project-check.ts';
import { countNamed, defineCreateProject, defineSetProject, noteAwaited } from './project-settings.ts';
import { printJson, printTable } from './results.ts';
import { shortName } from './shorten.ts';
import { fields } from './table.ts';

/** `davit admin project`. */
export function defineProjects(command: Command, context: CommandContext): void {
  explain(
    command,
    'The projects that are deployed: each has a command, or another system does the work and reports it.',
    [
      'davit admin project create --name website --dir /srv/website -- ./deploy.sh',
      'davit admin project list',
    ],
  );
  defineCreateProject(command.command('create'), context);
  defineList(command.command('list'), context);
  defineShow(command.command('show'), context);
  defineSetProject(command.command('set'), context);
  defineStatus(command.command('pause'), context, {
    status: 'paused',
    summary: 'queue deployments, but start none',
    text:
      'A paused project accepts and queues deployments, but starts none. Those that are running go on to their end. ' +
      'Another system that carries them out is answered 409 when it reports that one of them begins.',
  });
  defineStatus(command.command('resume'), context, {
    status: 'active',
    summary: 'start deployments again',
    text: 'Makes a paused or archived project active again. Deployments that wait are started in their order.',
  });
  defineArchive(command.command('archive'), context);
  defineCheckProject(command.command('check'), context);
}

function defineList(command: Command, context: CommandContext): void {
  explain(command.summary('all projects, archived ones too'), 'Lists all projects, oldest first.', [
    'davit admin project list',
    'davit admin project list --json',
  ])
    .addOption(jsonOption())
    .action((options: { json?: boolean }) =>
      withStore(command, context, 'refuse', (store) => {
        const projects = store.reads.projects.list();
        if (options.json === true) return printJson(context, projects);
        printProjects(projects, context);
      }),
    );
}

function printProjects(projects: readonly ProjectDetails[], context: CommandContext): void {
  printTable(
    context,
    projects,
    "there are no projects yet: 'davit admin project create --help' tells how to create one",
    [
      { title: 'ID', of: ({ id }) => id },
      { title: 'NAME', of: ({ name }) => name, shorten: shortName },
      { title: 'STATUS', of: ({ status }) => status },
      { title: 'WAITING', of: ({ queued_count }) => (queued_count === 0 ? '' : String(queued_count)) },
      { title: 'CREATED', of: ({ created_at }) => moment(context, created_at) },
      {
        title: 'COMMAND',
        of: ({ command }) => (command === null ? 'none' : quoted(command)),
        shorten: shortName,
      },
    ],
  );
}

function defineShow(command: Command, context: CommandContext): void {
  explain(
    command.summary('one project with its settings'),
    'Shows a project with its settings; of its variables only the names.',
    ['davit admin project show website'],
  )
    .argument(...PROJECT_ARGUMENT)
    .addOption(jsonOption())
    .action((text: string, options: { json?: boolean }) =>
      withStore(command, context, 'refuse', (store) => {
        const project = resolveProject(store, text);
        if (options.json === true) return printJson(context, project);
        context.terminal.print(projectText(project, context));
      }),
    );
}

function projectText(project: ProjectDetails, context: CommandContext): string {
  const limit = (durationMs: number | null) => (durationMs === null ? 'off' : formatDuration(durationMs));
  const { command } = project;
  const variables = project.variable_names.join(' ');
  const general = [
    ['id', project.id],
    ['name', project.name],
    ['status', project.status],
    ['created', exactMoment(context, project.created_at)],
  ] as const;
  if (command === null) {
    return fields(context.terminal, [
      ...general,
      ['command', 'none: another system does the work'],
      // They are kept for the command that it may have again.
      ['variables', variables || null],
      ['report timeout', limit(project.report_timeout_ms)],
    ]);
  }
  return fields(context.terminal, [
    ...general,
    ['command', quoted(command)],
    ['directory', project.directory ?? 'a new one each time'],
    ['variables', variables || 'none'],
    ['timeout', limit(project.timeout_ms)],
    ['idle timeout', limit(project.idle_timeout_ms)],
    ['policy', project.policy],
    ['waiting', String(project.queued_count)],
  ]);
}

function defineStatus(
  command: Command,
  context: CommandContext,
  { status, summary, text }: { status: 'paused' | 'active'; summary: string; text: string },
): void {
  explain(command.summary(summary), text, [`davit admin project ${command.name()} website`])
    .argument(...PROJECT_ARGUMENT)
    .addOption(jsonOption())
    .action((idOrName: string, options: { json?: boolean }) =>
      withStore(command, context, 'refuse', async (store) => {
        const before = resolveProject(store, idOrName);
        const project = await store.writer.write('projects.setStatus', { id: before.id, status });
        if (options.json === true) printJson(context, project);
        else {
          const already = before.status === status ? 'already ' : '';
          context.terminal.print(`${nameOfProject(project)} is ${already}${status}`);
        }
        // Its name counts again.
        if (before.status === 'archived')
          warnOfNamesakes(countNamed(before.name, store), 'projects', context);
      }),
    );
}

function defineArchive(command: Command, context: CommandContext): void {
  explain(
    command.summary('refuse new deployments, and cancel those that wait'),
    'An archived project is still listed, but refuses new deployments. Deployments that wait for its command are canceled; ' +
      'those that are running go on to their end. Of those that another system carries out none is canceled, but it is ' +
      'answered 409 when it reports that one of them begins. ' +
      "'davit admin project resume' makes the project active again.",
    ['davit admin project archive website', 'davit admin project archive prj_… --yes'],
  )
    .argument(...PROJECT_ARGUMENT)
    .addOption(option('--yes', 'do not ask before deployments are canceled'))
    .addOption(jsonOption())
    .action((text: string, options: ConfirmedOptions) => archive(command, text, options, context));
}

async function archive(
  command: Command,
  text: string,
  options: ConfirmedOptions,
  context: CommandContext,
): Promise<void> {
  const before = await withStore(command, context, 'refuse', (store) => resolveProject(store, text));
  if (before.queued_count > 0) {
    const consequence = `This cancels ${counted(before.queued_count, 'waiting deployment')}.`;
    await confirm(command, `${consequence}\nArchive ${nameOfProject(before)}?`, options.yes, context);
  }
  const { project, canceledIds, awaited } = await withStore(command, context, 'refuse', async (store) => ({
    ...(await store.writer.write('projects.archive', { id: before.id })),
    awaited: store.reads.deployments.reportsAwaited(before.id),
  }));
  if (options.json === true) printJson(context, project);
  else {
    const already = before.status === 'archived' ? 'already ' : '';
    const canceled =
      canceledIds.length === 0 ? '' : `; canceled ${counted(canceledIds.length, 'waiting deployment')}`;
    context.terminal.print(`${nameOfProject(project)} is ${already}archived${canceled}`);
  }
  noteAwaited(awaited, context);
}

/** As it would be typed in a shell. */
function quoted(words: readonly string[]): string {
  return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : singleQuoted(word))).join(' ');
}
