import { readFileSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import type { CommandContext } from './cli/command.ts';
import { runCommandLine } from './cli/commands.ts';
import { withEnvFrom } from './cli/env-file.ts';
import { createTerminal } from './cli/terminal.ts';
import { realEffects } from './effects.ts';
import { exitAtOnce } from './exit.ts';
import { absolutePath } from './paths.ts';
import { poolThreads } from './system-limits.ts';

/*
 * The entry point. Nothing else in src/ reads the arguments or the environment of the process, handles the signals that
 * end or reload it, or exits. The commands are in cli/commands.ts.
 */

const commandLine = withEnvFrom(process.argv.slice(2), process.env, () =>
  readFileSync('/proc/self/environ', 'utf8'),
);

/** `--env NAME` takes any variable, also one that is changed or forgotten below. */
const startEnvironment = { ...process.env };

/**
 * DNS lookups run in libuv's thread pool, by default in no more than two threads at a time: two names whose servers do
 * not answer would block every delivery. Must be set before the pool starts. Replaces what the environment says, as the
 * dispatcher looks up so many names at a time as this allows.
 */
process.env['UV_THREADPOOL_SIZE'] = String(poolThreads());

/** With a umask such as 177, meant to keep files private, davit could not enter the directories that it creates. */
process.umask(process.umask(0o077) & 0o077);

/** An empty one is refused, or has a meaning of its own. */
const KEPT_EMPTY = new Set([
  'DAVIT_DB', // davit would work on another file than was meant
  'DAVIT_TLS_CERT', // and serve without TLS
  'DAVIT_TLS_KEY',
  'DAVIT_EXPIRES_IN', // and make a key that never expires
  'DAVIT_HEADER', // a delivery without a signature
]);

forgetEmptyVariables();

/** It has no effect on davit's connections, but Node would warn that it has. */
delete process.env['NODE_TLS_REJECT_UNAUTHORIZED'];

nameProcess();

void main();

/** An empty variable counts as none: `${X:-}` of Compose and a variable that a CI lacks give such. */
function forgetEmptyVariables(): void {
  for (const [name, value] of Object.entries(process.env)) {
    if (value === '' && name.startsWith('DAVIT_') && !KEPT_EMPTY.has(name)) delete process.env[name];
  }
}

/**
 * The name that top(1), pgrep(1), systemctl(1) and the kernel's messages show, by default `MainThread`. To set
 * process.title would overwrite the arguments.
 */
function nameProcess(): void {
  try {
    writeFileSync('/proc/self/comm', 'davit');
  } catch {
    // Without /proc nobody can see the name.
  }
}

async function main(): Promise<void> {
  const context = createContext();
  const exitCode = await runCommandLine(context);
  // A success lets Node exit when nothing is open any more, with the exit code 1 that lost output may have set.
  if (exitCode === 0) return;
  await context.terminal.flushed();
  context.exit(exitCode);
}

function createContext(): CommandContext {
  const terminal = createTerminal(process, (error) => {
    process.exitCode = 1;
    terminal.note(`error: the output is lost: ${error.message}`);
  });
  return {
    terminal,
    commandLine,
    environment: process.env,
    startEnvironment,
    effects: realEffects,
    onSignal(names, listener) {
      const entries = names.map((name) => ({ name, listen: () => listener(name) }));
      for (const { name, listen } of entries) process.on(name, listen);
      return () => {
        for (const { name, listen } of entries) process.off(name, listen);
      };
    },
    exit(code) {
      if (isWaiting()) void leave(code);
      else process.exit(code);
    },
    exitWithThreads: (code) => void leave(code),
    leaveDirectory() {
      process.env['TMPDIR'] = absolutePath(tmpdir());
      process.chdir('/');
    },
  };
}

/** Whether libuv's threads run a DNS lookup or a file operation, for which `process.exit` would wait: see exit.ts. */
function isWaiting(): boolean {
  return process.getActiveResourcesInfo().some((name) => /^(?:GetAddrInfoReqWrap|FSReq)/.test(name));
}

function leave(code: number): Promise<void> {
  return exitAtOnce(code).catch(() => process.exit(code));
}
