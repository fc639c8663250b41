import type { Command } from 'commander';
import { cannotListen, type ServeConfig, serveConfig, serveOptions } from '../config.ts';
import { DAY_MS } from '../durations.ts';
import { releaseStartMemory } from '../memory.ts';
import {
  type CommandContext,
  dbPathOf,
  EXIT_CODE_OF_SIGNAL,
  errorText,
  explain,
  misused,
  stayAlive,
} from './command.ts';
import { migrateOlder } from './migrate.ts';
import { notifySystemd } from './notify.ts';
import { nearest } from './suggest.ts';
import { rootOf } from './usage.ts';

/** The promise is 30 s: whoever started davit may kill it then. */
const STOP_MAX_MS = 29_000;

/** timeout(1) signals its child and then its group, and npm passes on what the terminal has told both. */
const SAME_SIGNAL_MS = 200;

/** systemd's own limit for a start is 90 s. */
const MIGRATION_MAX_MS = DAY_MS;

/** `davit serve`: the service, until SIGTERM or SIGINT. */
export function defineServe(command: Command, context: CommandContext): void {
  explain(
    command,
    'Runs the service: the API, the deployments and the deliveries. The first line on stdout says where it listens; ' +
      'logs go to stderr. SIGTERM and SIGINT stop it cleanly within 30 s, a second one at once; SIGHUP reads ' +
      'certificates and keys anew. The file of an older davit is migrated first, and a copy of it kept.',
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
    await warnOfVariables(command, result.config, context);
    return serve(result.config, context);
  });
}

/** One whose name is wrong would set nothing, and nobody would know. */
async function warnOfVariables(
  command: Command,
  { logLevel }: ServeConfig,
  { environment, effects }: CommandContext,
): Promise<void> {
  const read = [...command.options, ...rootOf(command).options].flatMap(({ envVar = [] }) => envVar);
  const others = Object.keys(environment).filter((name) => name.startsWith('DAVIT_') && !read.includes(name));
  // Some are for other commands, or whoever runs it uses them; what they begin with is no resemblance.
  const warnings = others.flatMap((name) => {
    const meant = nearest(withoutPrefix(name), read.map(withoutPrefix));
    return meant === undefined ? [] : `${name} is no variable of davit serve: did you mean DAVIT_${meant}?`;
  });
  if (warnings.length === 0) return;
  const { createLogger, logFormOf } = await import('../logger.ts');
  const logger = createLogger({ level: logLevel, form: logFormOf(process.stderr) }, effects);
  for (const warning of warnings) logger.warn(warning);
}

function withoutPrefix(variable: string): string {
  return variable.replace(/^DAVIT_/, '');
}

async function serve(config: ServeConfig, context: CommandContext): Promise<void> {
  const { terminal, effects, onSignal, exitWithThreads: exit } = context;
  // To wait for the end of what a killed service left running does not keep the process alive by itself.
  using _ = stayAlive();
  const { promise: toldToStop, resolve: tellToStop } = Promise.withResolvers<void>();
  const start = new AbortController();
  let toldAtMs: number | undefined;
  onSignal(['SIGINT', 'SIGTERM'], (signal) => {
    if (toldAtMs !== undefined) {
      if (effects.monotonicMs() - toldAtMs > SAME_SIGNAL_MS) exit(EXIT_CODE_OF_SIGNAL[signal]);
      return;
    }
    toldAtMs = effects.monotonicMs();
    // The time counts from now on, also while davit still waits for the end of what a crash left running.
    effects.after(STOP_MAX_MS, () => {
      terminal.note('error: stopping took too long; the next start looks after what was running');
      exit(1);
    });
    start.abort();
    tellToStop();
  });
  let reload = () => {
    reloadIsDue = true;
  };
  let reloadIsDue = false;
  onSignal(['SIGHUP'], () => reload());
  // From its sources Node would open its debugger, to every user of the machine; the executable would end.
  onSignal(['SIGUSR1'], () => undefined);

  await migrateFirst(config, context);
  const { startService } = await import('../app.ts');
  const onFatal = (error: unknown) => {
    // Whatever still runs can do no more than the next start, which looks after it all.
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
  void notifySystemd('READY=1', context);
  releaseStartMemory(effects, 'main');
  await toldToStop;
  void notifySystemd('STOPPING=1', context);
  await service.stop();
  // Whatever a library still holds open keeps nobody waiting.
  exit(0);
}

/** An older file takes as long as its size asks for: systemd waits, and whoever looks is told. */
async function migrateFirst({ dbPath, logLevel }: ServeConfig, context: CommandContext): Promise<void> {
  const { isOlder, SCHEMA_VERSION } = await import('../store/database.ts');
  if (!isOlder(dbPath)) return;
  const { createLogger, logFormOf } = await import('../logger.ts');
  const logger = createLogger({ level: logLevel, form: logFormOf(process.stderr) }, context.effects);
  // SIGHUP ends no service, whatever it is at.
  const onSignal: CommandContext['onSignal'] = (names, listener) =>
    context.onSignal(
      names.filter((name) => name !== 'SIGHUP'),
      listener,
    );
  const migrated = await migrateOlder(
    dbPath,
    { ...context, onSignal },
    {
      onBegin() {
        void notifySystemd(`EXTEND_TIMEOUT_USEC=${MIGRATION_MAX_MS * 1_000}`, context);
        logger.info(
          { file: dbPath, to_schema: SCHEMA_VERSION },
          'an older davit wrote the file: copying it first',
        );
      },
      onKept: (keptAs) => logger.info({ kept_as: keptAs }, 'the file as it was is kept'),
      onStep: (schema) => logger.info({ to_schema: schema }, 'migrating'),
    },
  );
  logger.info({ ...migrated }, 'migrated: remove what is kept once all is well');
}

/** Any other error is left as it is. */
function listenProblem(error: unknown, { listen }: ServeConfig): unknown {
  if (!(error instanceof Error && 'syscall' in error && 'code' in error)) return error;
  if (error.syscall !== 'listen' && error.syscall !== 'getaddrinfo') return error;
  return cannotListen(listen, '--listen', error);
}
