import type { Command } from 'commander';
import { version } from '../assets.ts';
import { type CommandContext, type DefineCommand, explain } from './command.ts';
import type { COMPLETE_ARGUMENT } from './complete.ts';
import type { FILE_PROCESS } from './file-process.ts';
import { createProgram, runProgram } from './program.ts';

/* Every command, and the file that defines it. */

interface Entry {
  name: string;
  summary: string;
  /** For davit's own use. */
  hidden?: true;
  load(): Promise<DefineCommand>;
}

const COMMANDS: Entry[] = [
  {
    name: 'serve',
    summary: 'run the service',
    load: async () => (await import('./serve.ts')).defineServe,
  },
  {
    name: 'deploy',
    summary: 'a client: deploy, follow the log, exit with the result',
    load: async () => (await import('./deploy.ts')).defineDeploy,
  },
  {
    name: 'verify',
    summary: 'check the signature of a delivery',
    load: async () => (await import('./verify.ts')).defineVerify,
  },
  {
    name: 'backup',
    summary: 'back up the file, also while the service runs',
    load: async () => (await import('./backup.ts')).defineBackup,
  },
  {
    name: 'restore',
    summary: 'replace the file with such a backup',
    load: async () => (await import('./restore.ts')).defineRestore,
  },
  {
    name: 'doctor',
    summary: 'find what is wrong, or soon will be',
    load: async () => (await import('./doctor.ts')).defineDoctor,
  },
  {
    name: 'completion',
    summary: 'print a completion script for a shell',
    load: async () => (await import('./completion.ts')).defineCompletion,
  },
  {
    name: '__file' satisfies typeof FILE_PROCESS,
    summary: '',
    hidden: true,
    load: async () => (await import('./file-process.ts')).defineFileProcess,
  },
];

const ADMIN_COMMANDS: Entry[] = [
  {
    name: 'project',
    summary: 'what is deployed, and how',
    load: async () => (await import('./projects.ts')).defineProjects,
  },
  {
    name: 'key',
    summary: 'who may call the API',
    load: async () => (await import('./keys.ts')).defineKeys,
  },
  {
    name: 'deployment',
    summary: 'create, list, follow and cancel deployments',
    load: async () => (await import('./deployments.ts')).defineDeployments,
  },
  {
    name: 'webhook',
    summary: 'who is told of deployments, and with what success',
    load: async () => (await import('./webhooks.ts')).defineWebhooks,
  },
  {
    name: 'queue',
    summary: 'what runs, waits and is retried',
    load: async () => (await import('./queue.ts')).defineQueue,
  },
  {
    name: 'migrate',
    summary: 'migrate the file of an older davit',
    load: async () => (await import('./migrate.ts')).defineMigrate,
  },
  {
    name: 'systemd-unit',
    summary: 'print a systemd unit for this davit',
    load: async () => (await import('./systemd-unit.ts')).defineSystemdUnit,
  },
];

/** Runs the command line. Resolves to the exit code, as `runProgram` does. */
export async function runCommandLine(context: CommandContext): Promise<number> {
  const [first, ...words] = context.commandLine;
  const program = await programFor(context);
  if (first !== ('__complete' satisfies typeof COMPLETE_ARGUMENT)) return runProgram(program, context);
  const { answerCompletion } = await import('./completion.ts');
  return answerCompletion(program, words, context);
}

async function programFor(context: CommandContext): Promise<Command> {
  const program = createProgram(version, context);
  await addCommands(program, COMMANDS, context);
  const admin = explain(
    program.command('admin').helpCommand(false).summary('administer davit on its own machine'),
    'Works on the file itself, whether the service runs or not; a running service takes changes up within a second.',
    [
      'davit admin key create --name ci --scope deployments:write --project website',
      'davit admin deployment list --status failed',
      'davit admin queue',
    ],
  );
  await addCommands(admin, ADMIN_COMMANDS, context);
  return program;
}

/** Loads only commands whose name is somewhere in the command line. For the others, name and summary are enough. */
async function addCommands(
  parent: Command,
  entries: readonly Entry[],
  context: CommandContext,
): Promise<void> {
  for (const { name, summary, hidden = false, load } of entries) {
    const command = parent.command(name, { hidden }).summary(summary).helpCommand(false);
    if (context.commandLine.includes(name)) (await load())(command, context);
  }
}
