import { readFileSync } from 'node:fs';
import { createSecureContext } from 'node:tls';
import type { Command } from 'commander';
import { type ServeConfig, serveConfig, serveOptions } from '../config.ts';
import { AppError } from '../errors.ts';
import {
  type CommandContext,
  dbPathOf,
  EXIT_CODE_OF_SIGNAL,
  errorText,
  explain,
  misused,
  stayAlive,
} from './command.ts';
import { notifySystemd } from './notify.ts';

/** The promise is 30 s: whoever started davit may kill it then. */
const STOP_MAX_MS = 29_000;

/** `davit serve`: the service, until SIGTERM or SIGINT. */
export function defineServe(command: Command, context: CommandContext): void {
  explain(
    command,
    'Runs the service: the API, the deployments and the deliveries. The first line on stdout says where it listens; ' +
      'logs go to stderr. SIGTERM and SIGINT stop it cleanly within 30 s, a second one at once.',
    [
      'davit serve',
      'davit serve --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem',
      'DAVIT_MAX_CONCURRENT=4 davit serve',
    ],
  );
  for (const serveOption of serveOptions()) command.addOption(serveOption);
  command.action((values: Record<string, unknown>) => {
    const result = serveConfig(dbPathOf(command), values);
    if (!result.ok) misused(command, result.reason);
    checkFiles(result.config);
    return serve(result.config, context);
  });
}

async function serve(config: ServeConfig, context: CommandContext): Promise<void> {
  const { terminal, effects, onSignal, exit } = context;
  // Waiting for the end of a helper that a killed service left is nothing that would.
  using _ = stayAlive();
  const { promise: toldToStop, resolve: tellToStop } = Promise.withResolvers<void>();
  let signals = 0;
  onSignal((signal) => {
    signals += 1;
    if (signals > 1) exit(EXIT_CODE_OF_SIGNAL[signal]);
    tellToStop();
  });

  const { startService } = await import('../app.ts');
  const onFatal = (error: unknown) => {
    // Whatever still runs can do no more than the next start, which looks after it all.
    terminal.note(errorText(error));
    exit(1);
  };
  const service = await startService(config, effects, onFatal).catch((error) => {
    throw listenProblem(error, config);
  });
  terminal.print(`davit listening on ${service.url}`);
  void notifySystemd('READY=1', context);
  await toldToStop;
  void notifySystemd('STOPPING=1', context);
  effects.after(STOP_MAX_MS, () => {
    terminal.note('error: stopping took too long; the next start looks after what was running');
    exit(1);
  });
  await service.stop();
  // Whatever a library still holds open keeps nobody waiting.
  exit(0);
}

/** What the system has against the address is said by the option's name. */
function listenProblem(error: unknown, { listen }: ServeConfig): unknown {
  if (!(error instanceof Error && 'syscall' in error && 'code' in error)) return error;
  if (error.syscall !== 'listen' && error.syscall !== 'getaddrinfo') return error;
  const { host, port } = listen;
  return new AppError(
    'unavailable',
    `cannot listen on ${host.includes(':') ? `[${host}]` : host}:${port} (${String(error.code)}): choose another place with --listen`,
    { cause: error },
  );
}

/** What is wrong with these files is said by the option's name, before anything is started. */
function checkFiles({ tls, webhookCaFile }: ServeConfig): void {
  if (webhookCaFile !== null) readPem('--webhook-ca-file', webhookCaFile);
  if (tls === null) return;
  const cert = readPem('--tls-cert', tls.certPath);
  const key = readPem('--tls-key', tls.keyPath);
  try {
    createSecureContext({ cert, key });
  } catch (error) {
    throw new AppError(
      'invalid_request',
      `--tls-cert and --tls-key cannot be used together (${messageOf(error)}): give a certificate in PEM and its own key`,
      { cause: error },
    );
  }
}

/** The file that an option names. Throws AppError `invalid_request` with the option's name. */
export function readPem(optionName: string, path: string): Buffer {
  try {
    return readFileSync(path);
  } catch (error) {
    throw new AppError('invalid_request', `${optionName}: ${messageOf(error)}`, { cause: error });
  }
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
