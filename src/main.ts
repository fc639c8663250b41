import type { Command } from 'commander';
import { version } from './assets.ts';
import { type CommandContext, createProgram, type DefineCommand, runProgram } from './cli/command.ts';
import { createTerminal } from './cli/terminal.ts';
import type { SPAWNER_ARGUMENT } from './deploy/spawner-process.ts';
import { realEffects } from './effects.ts';

/*
 * The command line's table of contents. Nothing else in src/ reads the arguments or the environment of the
 * process, takes its signals or ends it, but the small process that spawns commands.
 */

interface Entry {
  name: string;
  summary: string;
  load(): Promise<DefineCommand>;
}

const COMMANDS: Entry[] = [
  {
    name: 'serve',
    summary: 'run the service',
    load: async () => (await import('./cli/serve.ts')).defineServe,
  },
  {
    name: 'verify',
    summary: 'check the signature of a delivery',
    load: async () => (await import('./cli/verify.ts')).defineVerify,
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
];

void main(process.argv.slice(2));

async function main(commandLine: string[]): Promise<void> {
  if (commandLine[0] === ('__spawner' satisfies typeof SPAWNER_ARGUMENT)) {
    return (await import('./deploy/spawner-process.ts')).runSpawner();
  }
  const context = contextOf(process, commandLine);
  const program = createProgram(version, context);
  await addCommands(program, COMMANDS, context);
  const admin = program
    .command('admin')
    .helpCommand(false)
    .summary('look after projects and keys, on the machine itself')
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
  for (const { name, summary, load } of entries) {
    const command = parent.command(name).summary(summary).helpCommand(false);
    if (context.commandLine.includes(name)) (await load())(command, context);
  }
}

function contextOf(self: NodeJS.Process, commandLine: string[]): CommandContext {
  const terminal = createTerminal(self, (error) => {
    self.exitCode = 1;
    terminal.note(`error: the output is lost: ${error.message}`);
  });
  return {
    terminal,
    commandLine,
    environment: self.env,
    effects: realEffects,
    onSignal(listener) {
      for (const signal of ['SIGINT', 'SIGTERM'] as const) self.on(signal, () => listener(signal));
    },
    exit: (code) => self.exit(code),
  };
}
