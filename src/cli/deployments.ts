import type { Command } from 'commander';
import { someSettings } from '../config.ts';
import { DEPLOYMENT_STATUSES, type Deployment, type Ref } from '../domain.ts';
import { AppError } from '../errors.ts';
import { appending, option } from '../options.ts';
import { ADMINISTRATOR } from '../store/administrator.ts';
import type { ProjectDetails } from '../store/projects.ts';
import type { Store } from '../store/store.ts';
import { type CommandContext, explain, jsonOption } from './command.ts';
import { withStore } from './database-file.ts';
import { defineLogs } from './deployment-logs.ts';
import { obstacleOf, STATUS_COLOURS, statusText } from './deployment-status.ts';
import { chosenOf, latestOf, limitOption, noteCut } from './lists.ts';
import { exactMomentOf, moment, tookText } from './moments.ts';
import {
  DEPLOYMENT_ARGUMENT,
  nameOfProject,
  PROJECT_ARGUMENT,
  projectNames,
  refOf,
  resolveDeployment,
  resolveProject,
} from './names.ts';
import { printJson, printMade, printTable } from './results.ts';
import { isServed } from './serving.ts';
import { shortName, shortRef, shortStatus } from './shorten.ts';
import { fields } from './table.ts';

/** `davit admin deployment`. */
export function defineDeployments(command: Command, context: CommandContext): void {
  explain(
    command,
    'The deployments of all projects. The service carries them out; those that are created while it does not run wait for it.',
    [
      'davit admin deployment create website v1.2.3',
      'davit admin deployment list --project website --status failed',
      'davit admin deployment logs dpl_… -f',
    ],
  );
  defineCreate(command.command('create'), context);
  defineList(command.command('list'), context);
  defineShow(command.command('show'), context);
  defineLogs(command.command('logs'), context);
  defineCancel(command.command('cancel'), context);
  defineRedeploy(command.command('redeploy'), context);
}

/** The same option as that of `davit serve`. */
const queueLimit = someSettings('maxQueued');

type MakeOptions = Record<string, unknown> & { json?: boolean };

function defineCreate(command: Command, context: CommandContext): void {
  explain(
    command.summary('deploy a ref; prints the id'),
    'Creates a deployment and prints its id. It waits for earlier deployments of its project.',
    ['davit admin deployment create website v1.2.3', 'davit admin deployment create website main --json'],
  )
    .argument(...PROJECT_ARGUMENT)
    .argument('<ref>', "a branch, a tag or a commit: whatever the project's command takes", refOf)
    .addOption(jsonOption())
    .action((text: string, ref: Ref, options: MakeOptions) =>
      make(command, options, context, (store, maxQueued) => {
        const project = resolveProject(store, text);
        refuseArchived(project);
        return store.writer.write('deployments.create', {
          projectId: project.id,
          ref,
          trigger: 'admin',
          keyId: null,
          redeployOf: null,
          maxQueued,
        });
      }),
    );
  for (const setting of queueLimit.options()) command.addOption(setting);
}

function defineRedeploy(command: Command, context: CommandContext): void {
  explain(
    command.summary('deploy the same ref again; prints the new id'),
    'Creates a new deployment of the same ref and prints its id. It uses what the ref means now, and the current settings ' +
      'of the project.',
    ['davit admin deployment redeploy dpl_…'],
  )
    .argument(...DEPLOYMENT_ARGUMENT)
    .addOption(jsonOption())
    .action((text: string, options: MakeOptions) =>
      make(command, options, context, (store, maxQueued) => {
        const { id, project_id } = resolveDeployment(store, text);
        refuseArchived(resolveProject(store, project_id));
        return store.writer.write('deployments.redeploy', { id, keyId: null, maxQueued });
      }),
    );
  for (const setting of queueLimit.options()) command.addOption(setting);
}

function refuseArchived(project: ProjectDetails): void {
  if (project.status !== 'archived') return;
  throw new AppError(
    'conflict',
    `${nameOfProject(project)} is archived and accepts no deployments: 'davit admin project resume' makes it active again`,
  );
}

async function make(
  command: Command,
  options: MakeOptions,
  context: CommandContext,
  write: (store: Store, maxQueued: number | null) => Promise<Deployment>,
): Promise<void> {
  const { maxQueued } = queueLimit.valuesFrom(options);
  const { deployment, project, served } = await withStore(command, context, 'refuse', async (store) => {
    const made = await write(store, maxQueued);
    return {
      deployment: made,
      project: resolveProject(store, made.project_id),
      served: await isServed(command),
    };
  });
  const text = `created a deployment of ${deployment.ref} in ${nameOfProject(project)}`;
  printMade(context, options, deployment, text, deployment.id);
  const obstacle = obstacleOf(deployment, project, served);
  if (obstacle !== undefined) context.terminal.note(`note: ${obstacle}`);
}

interface ListOptions {
  project?: string;
  status?: string[];
  limit: number;
  json?: boolean;
}

function defineList(command: Command, context: CommandContext): void {
  explain(command.summary('the latest deployments'), 'Lists deployments, newest first.', [
    'davit admin deployment list',
    'davit admin deployment list --project website --status failed canceled',
    'davit admin deployment list --limit 500 --json',
  ])
    .addOption(option('--project <project>', 'only those of this project, by id or name'))
    .addOption(
      option('--status <status...>', `only these: ${DEPLOYMENT_STATUSES.join(', ')}`)
        .choices(DEPLOYMENT_STATUSES)
        .argParser(appending(String)),
    )
    .addOption(limitOption())
    .addOption(jsonOption())
    .action((options: ListOptions) => {
      const statuses =
        options.status === undefined
          ? null
          : chosenOf(command, 'status', options.status, DEPLOYMENT_STATUSES);
      return withStore(command, context, 'refuse', async (store) => {
        const projectId = options.project === undefined ? null : resolveProject(store, options.project).id;
        const filter = { projectId, statuses, ref: null, createdAfterMs: null, createdBeforeMs: null };
        const { items, isAll } = await latestOf(options.limit, (beforeSeq, limit) =>
          store.reads.deployments.page(ADMINISTRATOR, filter, beforeSeq, limit),
        );
        if (options.json === true) printJson(context, items);
        else printDeployments(items, store, context);
        if (!isAll) noteCut(command, items.length, context);
      });
    });
}

function printDeployments(items: readonly Deployment[], store: Store, context: CommandContext): void {
  const names = projectNames(store.reads);
  printTable(
    context,
    items,
    "there are no such deployments: 'davit admin deployment create --help' tells how to create one",
    [
      { title: 'ID', of: ({ id }) => id },
      { title: 'PROJECT', of: ({ project_id }) => names.get(project_id) ?? project_id, shorten: shortName },
      { title: 'REF', of: ({ ref }) => ref, shorten: shortRef },
      {
        title: 'STATUS',
        of: (deployment) => statusText(deployment),
        colour: ({ status }) => STATUS_COLOURS[status],
        shorten: shortStatus,
      },
      { title: 'CREATED', of: ({ created_at }) => moment(context, created_at) },
      { title: 'TOOK', of: ({ duration_ms }) => (duration_ms === null ? '' : tookText(duration_ms)) },
    ],
  );
}

function defineShow(command: Command, context: CommandContext): void {
  explain(command.summary('one deployment'), 'Shows a deployment with its status, times and outputs.', [
    'davit admin deployment show dpl_…',
  ])
    .argument(...DEPLOYMENT_ARGUMENT)
    .addOption(jsonOption())
    .action((text: string, options: { json?: boolean }) =>
      withStore(command, context, 'refuse', (store) => {
        const deployment = resolveDeployment(store, text);
        if (options.json === true) return printJson(context, deployment);
        context.terminal.print(deploymentText(deployment, store, context));
      }),
    );
}

function deploymentText(deployment: Deployment, store: Store, context: CommandContext): string {
  const at = exactMomentOf(context);
  const { created_by, duration_ms, log_bytes, log_truncated } = deployment;
  const project = resolveProject(store, deployment.project_id);
  return fields(context.terminal, [
    ['id', deployment.id],
    ['project', `${project.name} (${project.id})`],
    ['ref', deployment.ref],
    ['status', statusText(deployment)],
    ['message', deployment.message],
    ['created', at(deployment.created_at)],
    [
      'created by',
      created_by === null ? 'admin, on the machine' : `key ${created_by.name} (${created_by.key_id})`,
    ],
    ['started', at(deployment.started_at)],
    ['finished', at(deployment.finished_at)],
    ['took', duration_ms === null ? null : tookText(duration_ms)],
    ['redeploy of', deployment.redeploy_of],
    ['superseded by', deployment.superseded_by],
    ...Object.entries(deployment.outputs).map(([name, value]) => ['output', `${name}=${value}`] as const),
    ['log', `${log_bytes} bytes${log_truncated ? ', the middle left out' : ''}`],
  ]);
}

function defineCancel(command: Command, context: CommandContext): void {
  explain(
    command.summary('cancel a deployment that waits or runs'),
    'A deployment that waits is canceled at once. If it runs, the service stops its command, and the status is canceling ' +
      'until none of its processes is left.',
    ['davit admin deployment cancel dpl_…'],
  )
    .argument(...DEPLOYMENT_ARGUMENT)
    .addOption(jsonOption())
    .action((text: string, options: { json?: boolean }) => cancel(command, text, options, context));
}

async function cancel(
  command: Command,
  text: string,
  options: { json?: boolean },
  context: CommandContext,
): Promise<void> {
  const { before, after, byDavit, served } = await withStore(command, context, 'refuse', async (store) => {
    const found = resolveDeployment(store, text);
    const changed = await store.writer.write('deployments.cancel', { id: found.id });
    return {
      before: found,
      after: changed,
      byDavit: store.reads.deployments.running().some(({ id }) => id === found.id),
      served: await isServed(command),
    };
  });
  if (options.json === true) return printJson(context, after);
  const name = `deployment ${after.id} of ${after.ref}`;
  if (after.status === 'canceled') return context.terminal.print(`${name} is canceled`);
  const already = before.status === 'canceling' ? 'already ' : '';
  context.terminal.print(`${name} is ${already}being canceled`);
  if (!byDavit) {
    context.terminal.note(
      "note: it ends when another system reports it as failed, or by a time limit: 'davit admin project set --report-timeout'",
    );
  } else if (!served) {
    context.terminal.note("note: no service is running: 'davit serve' ends it when it starts");
  }
}
