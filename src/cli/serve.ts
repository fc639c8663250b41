import type { Command } from 'commander';
import { cannotListen, type ServeConfig, serveConfig, serveOptions } from '../config.ts';
import { DAY_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import { releaseStartMemory } from '../memory.ts';
import {
  type CommandContext,
  countingOnce,
  EXIT_CODE_OF_SIGNAL,
  explain,
  misused,
  stayAlive,
} from './command.ts';
import { allOptions } from './command-tree.ts';
import { dbPathOf } from './database-file.ts';
import { errorText } from './error-text.ts';
import { migrateOlder } from './migrate.ts';
import { createNotifier, type SystemdState } from './notify.ts';
import { nearest } from './suggest.ts';

/** 30 s are promised, after which a service manager may kill davit. */
const STOP_MAX_MS = 29_000;

/** In place of the 90 s that systemd allows for a start. */
const MIGRATION_MAX_MS = DAY_MS;

/** `davit serve`: the service, until SIGTERM or SIGINT. */
export function defineServe(command: Command, context: CommandContext): void {
  explain(
    command,
    'Runs the service: the API, the deployments and the deliveries. The first line on stdout says where it listens; ' +
      'logs go to stderr. SIGTERM and SIGINT stop it cleanly within 30 s, a second one at once; SIGHUP reloads ' +
      'certificates and keys. The file of an older davit is migrated first, and a copy of it is kept.',
    [
      'davit serve',
      'davit serve --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem',
      'DAVIT_MAX_CONCURRENT=4 davit serve',
      'davit serve --metrics-listen 127.0.0.1:9464',
    ],
  );
  for (const serveOption of serveOptions()) command.addOption(serveOption);
  command.action(async (values: Record<string, unknown>) => {
    const result = serveConfig(dbPathOf(command), values);
    if (!result.ok) misused(command, result.reason);
    context.leaveDirectory();
    await warnOfVariables(command, result.config, context);
    return serve(result.config, context);
  });
}

/** A misspelt variable would silently set nothing. */
async function warnOfVariables(
  command: Command,
  config: ServeConfig,
  { environment, effects }: CommandContext,
): Promise<void> {
  const read = allOptions(command).flatMap(({ envVar = [] }) => envVar);
  const others = Object.keys(environment).filter((name) => name.startsWith('DAVIT_') && !read.includes(name));
  // Only if a name resembles one that is read: others are for other commands or for scripts. All begin with DAVIT_.
  for (const name of others) {
    const meant = nearest(withoutPrefix(name), read.map(withoutPrefix));
    if (meant === undefined) continue;
    await warn(`${name} is no variable of davit serve: did you mean DAVIT_${meant}?`, config, effects);
  }
}

/** For what is said before the service, which has its own: made at each start, it delayed the service by 8 ms. */
async function loggerOf({ logLevel }: ServeConfig, effects: Effects): Promise<Logger> {
  const { createLogger, logFormOf } = await import('../logger.ts');
  return createLogger({ level: logLevel, form: logFormOf(process.stderr) }, effects);
}

function withoutPrefix(variable: string): string {
  return variable.replace(/^DAVIT_/, '');
}

async function serve(config: ServeConfig, context: CommandContext): Promise<void> {
  const { terminal, effects, onSignal, exitWithThreads: exit } = context;
  // Waiting for what a killed service left running would not keep the process alive.
  using _ = stayAlive();
  const { promise: toldToStop, resolve: tellToStop } = Promise.withResolvers<void>();
  const start = new AbortController();
  const stop = (signal: 'SIGINT' | 'SIGTERM') => {
    if (start.signal.aborted) return exit(EXIT_CODE_OF_SIGNAL[signal]);
    // From now on, even if davit is still starting, and waits for what a crash left running.
    effects.after(STOP_MAX_MS, () => {
      terminal.note('error: stopping took too long; the next start ends what is still running');
      exit(1);
    });
    start.abort();
    tellToStop();
  };
  onSignal(['SIGINT', 'SIGTERM'], countingOnce(stop, effects));
  let reload = () => {
    reloadIsDue = true;
  };
  let reloadIsDue = false;
  onSignal(['SIGHUP'], () => reload());
  // Without a listener, Node would open its debugger to every user of the machine, and the executable would end.
  onSignal(['SIGUSR1'], () => undefined);

  const tellSystemd = createNotifier(context, (text) => void warn(text, config, effects));
  await migrateFirst(config, context, tellSystemd);
  const { startService } = await import('../app.ts');
  const onFatal = (error: unknown) => {
    // At once, without a clean stop: the next start ends what is still running.
    terminal.note(errorText(error));
    exit(1);
  };
  const service = await startService(config, effects, onFatal, start.signal).catch((error) => {
    if (error === start.signal.reason) return undefined;
    throw listenProblem(error, config);
  });
  if (service === undefined) return exit(0);
  reload = service.reload;
  if (reloadIsDue) reload();
  terminal.print(`davit listening on ${service.url}`);
  void tellSystemd('READY=1');
  releaseStartMemory(effects, 'main');
  await toldToStop;
  void tellSystemd('STOPPING=1');
  await service.stop();
  // In any case, even if a library still holds something open.
  exit(0);
}

async function warn(text: string, config: ServeConfig, effects: Effects): Promise<void> {
  const logger = await loggerOf(config, effects);
  logger.warn(text);
}

/**
 * Migrates an older file. That may take long for a large one, so systemd is told to wait, and the progress is logged.
 */
async function migrateFirst(
  config: ServeConfig,
  context: CommandContext,
  tellSystemd: (state: SystemdState) => Promise<void>,
): Promise<void> {
  const { dbPath } = config;
  let logger: Logger | undefined;
  // Without SIGHUP, which must not end a service.
  const onSignal: CommandContext['onSignal'] = (names, listener) =>
    context.onSignal(
      names.filter((name) => name !== 'SIGHUP'),
      listener,
    );
  const migrated = await migrateOlder(
    dbPath,
    // A stop is a clean end also now: for systemd, any other exit code is a failure.
    { ...context, onSignal, exit: () => context.exit(0) },
    {
      async onBegin(schema) {
        void tellSystemd(`EXTEND_TIMEOUT_USEC=${MIGRATION_MAX_MS * 1_000}`);
        logger = await loggerOf(config, context.effects);
        logger.info({ file: dbPath, to_schema: schema }, 'an older davit wrote the file: copying it first');
      },
      onKept: (keptAs) => logger?.info({ kept_as: keptAs }, 'the file as it was is kept'),
      onStep: (schema) => logger?.info({ to_schema: schema }, 'migrating'),
    },
  );
  logger?.info({ ...migrated }, 'migrated: remove what is kept once all is well');
}

/** Any other error is left as it is. */
function listenProblem(error: unknown, { listen }: ServeConfig): unknown {
  if (!(error instanceof Error && 'syscall' in error && 'code' in error)) return error;
  if (error.syscall !== 'listen' && error.syscall !== 'getaddrinfo') return error;
  return cannotListen(listen, '--listen', error);
}
