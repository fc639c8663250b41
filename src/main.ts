import type { Command } from 'commander';
import type { CommandContext, DefineCommand } from './cli/command.ts';
import type { FILE_PROCESS } from './cli/file-process.ts';
import type { SPAWNER_ARGUMENT } from './deploy/spawner-process.ts';

/*
 * The command line's table of contents. Nothing else in src/ reads the arguments or the environment of the
 * process, takes its signals or ends it, but the small process that spawns commands.
 */

interface Entry {
  name: string;
  summary: string;
  /** Davit itself calls it. */
  hidden?: true;
  load(): Promise<DefineCommand>;
}

const COMMANDS: Entry[] = [
  {
    name: 'serve',
    summary: 'run the service',
    load: async () => (await import('./cli/serve.ts')).defineServe,
  },
  {
    name: 'deploy',
    summary: 'a client: deploy, follow the log, exit as it ended',
    load: async () => (await import('./cli/deploy.ts')).defineDeploy,
  },
  {
    name: 'verify',
    summary: 'check the signature of a delivery',
    load: async () => (await import('./cli/verify.ts')).defineVerify,
  },
  {
    name: 'backup',
    summary: 'copy the file of a running service',
    load: async () => (await import('./cli/backup.ts')).defineBackup,
  },
  {
    name: 'restore',
    summary: 'take such a copy back',
    load: async () => (await import('./cli/restore.ts')).defineRestore,
  },
  {
    name: 'doctor',
    summary: 'what is wrong, or soon will be',
    load: async () => (await import('./cli/doctor.ts')).defineDoctor,
  },
  {
    name: '__file' satisfies typeof FILE_PROCESS,
    summary: '',
    hidden: true,
    load: async () => (await import('./cli/file-process.ts')).defineFileProcess,
  },
];

const ADMIN_COMMANDS: Entry[] = [
  {
    name: 'project',
    summary: 'what is deployed, and how',
    load: async () => (await import('./cli/projects.ts')).defineProjects,
  },
  {
    name: 'key',
    summary: 'who may call the API',
    load: async () => (await import('./cli/keys.ts')).defineKeys,
  },
  {
    name: 'deployment',
    summary: 'make, list, follow and cancel deployments',
    load: async () => (await import('./cli/deployments.ts')).defineDeployments,
  },
  {
    name: 'webhook',
    summary: 'who is told of deployments, and how that goes',
    load: async () => (await import('./cli/webhooks.ts')).defineWebhooks,
  },
  {
    name: 'queue',
    summary: 'what runs, waits and is retried',
    load: async () => (await import('./cli/queue.ts')).defineQueue,
  },
  {
    name: 'migrate',
    summary: 'bring the file of an older davit up to this one',
    load: async () => (await import('./cli/migrate.ts')).defineMigrate,
  },
  {
    name: 'systemd-unit',
    summary: 'a unit file for this davit',
    load: async () => (await import('./cli/systemd-unit.ts')).defineSystemdUnit,
  },
];

/**
 * Names are resolved in libuv's threads, and by default no more than two at a time: two names that nobody
 * answers for would hold up every delivery. Must be set before the first of these threads starts.
 */
process.env['UV_THREADPOOL_SIZE'] ??= '64';

void main(process.argv.slice(2));

async function main(commandLine: string[]): Promise<void> {
  if (commandLine[0] === ('__spawner' satisfies typeof SPAWNER_ARGUMENT)) {
    return (await import('./deploy/spawner-process.ts')).runSpawner();
  }
  // Everything else is imported here, so that the helper process stays small: 49 MB in place of 60.
  const { version } = await import('./assets.ts');
  const { createProgram, runProgram } = await import('./cli/command.ts');
  const context = await contextOf(process, commandLine);
  const program = createProgram(version, context);
  await addCommands(program, COMMANDS, context);
  const admin = program
    .command('admin')
    .helpCommand(false)
    .summary('look after all of it, on the machine itself')
    .description(
      'Works on the file itself, whether the service runs or not; a running one takes it up within a second.',
    );
  await addCommands(admin, ADMIN_COMMANDS, context);
  const exitCode = await runProgram(program, context);
  // Only a success waits for what is still open; and it leaves the 1 of output that was lost.
  if (exitCode !== 0) process.exit(exitCode);
}

/** Only commands whose name is given somewhere can be meant: of the others the name and the summary are enough. */
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

async function contextOf(self: NodeJS.Process, commandLine: string[]): Promise<CommandContext> {
  const { createTerminal } = await import('./cli/terminal.ts');
  const { realEffects } = await import('./effects.ts');
  const terminal = createTerminal(self, (error) => {
    self.exitCode = 1;
    terminal.note(`error: the output is lost: ${error.message}`);
  });
  return {
    terminal,
    commandLine,
    environment: self.env,
    effects: realEffects,
    onSignal(names, listener) {
      const entries = names.map((name) => ({ name, listen: () => listener(name) }));
      for (const { name, listen } of entries) self.on(name, listen);
      return () => {
        for (const { name, listen } of entries) self.off(name, listen);
      };
    },
    exit: (code) => self.exit(code),
  };
}
