import type { CommandContext } from './cli/command.ts';
import type { SPAWNER_ARGUMENT } from './deploy/spawner-process.ts';

/*
 * What davit is started as. Nothing else in src/ reads the arguments or the environment of the process, takes its
 * signals or ends it, but the small process that spawns commands. The commands are in cli/commands.ts.
 */

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
  const { runCommandLine } = await import('./cli/commands.ts');
  const exitCode = await runCommandLine(await contextOf(process, commandLine));
  // Only a success waits for what is still open; and it leaves the 1 of output that was lost.
  if (exitCode !== 0) process.exit(exitCode);
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
    onSignal(listener) {
      for (const signal of ['SIGINT', 'SIGTERM'] as const) self.on(signal, () => listener(signal));
    },
    exit: (code) => self.exit(code),
  };
}
