import type { CommandContext } from './cli/command.ts';
import { runCommandLine } from './cli/commands.ts';
import { createTerminal } from './cli/terminal.ts';
import { realEffects } from './effects.ts';
import { exitAtOnce } from './exit.ts';
import { poolThreads } from './system-limits.ts';

/*
 * What davit is started as. Nothing else in src/ reads the arguments or the environment of the process, takes the
 * signals that end or reload it, or says when it ends. The commands are in cli/commands.ts.
 */

/**
 * Names are resolved in libuv's threads, and by default no more than two at a time: two names that nobody
 * answers for would hold up every delivery. Must be set before the first of these threads starts.
 */
process.env['UV_THREADPOOL_SIZE'] ??= String(poolThreads());

/** By a umask such as 177, said to keep files private, davit would be kept out of the directories that it makes. */
process.umask(process.umask(0o077) & 0o077);

void main(process.argv.slice(2));

async function main(commandLine: string[]): Promise<void> {
  const context = contextOf(process, commandLine);
  const exitCode = await runCommandLine(context);
  // Only a success waits for what is still open; and it leaves the 1 of output that was lost.
  if (exitCode === 0) return;
  await context.terminal.flushed();
  context.exit(exitCode);
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
    onSignal(names, listener) {
      const entries = names.map((name) => ({ name, listen: () => listener(name) }));
      for (const { name, listen } of entries) self.on(name, listen);
      return () => {
        for (const { name, listen } of entries) self.off(name, listen);
      };
    },
    exit(code) {
      if (isWaiting(self)) void leave(code);
      else self.exit(code);
    },
    exitWithThreads: (code) => void leave(code),
  };
}

/** Whether a name is being resolved, or a file looked at, which `process.exit` would wait for: see exit.ts. */
function isWaiting(self: NodeJS.Process): boolean {
  return self.getActiveResourcesInfo().some((name) => /^(?:GetAddrInfoReqWrap|FSReq)/.test(name));
}

function leave(code: number): Promise<void> {
  return exitAtOnce(code).catch(() => process.exit(code));
}
