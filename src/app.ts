import { existsSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { resolve } from 'node:path';
import { Server as TlsListener } from 'node:tls';
import { MessageChannel } from 'node:worker_threads';
import { version } from './assets.ts';
import { createClockSettings } from './clock.ts';
import { listenText, type ServeConfig } from './config.ts';
import { deliveryFigures } from './deliver/figures.ts';
import { startDispatcherThread } from './deliver/thread.ts';
import { createExecutor } from './deploy/executor.ts';
import { createOverdue } from './deploy/overdue.ts';
import { loadPosix } from './deploy/posix.ts';
import { hasOrphans, hiddenProcessesProblem, requireOwnProc } from './deploy/proc.ts';
import { holdersOf } from './deploy/processes.ts';
import { recover } from './deploy/recover.ts';
import { createSpawner } from './deploy/spawner.ts';
import { createWorkspaces, parentProblem } from './deploy/workspace.ts';
import { delay, type Effects } from './effects.ts';
import { AppError, isUnavailable, messageOf } from './errors.ts';
import { figuresMemory } from './figures.ts';
import { certificatesOf } from './http/certificates.ts';
import { replaceCertificate } from './http/tls.ts';
import { createWatches } from './http/watches.ts';
import { createLogger, type Logger, logFormOf } from './logger.ts';
import { POLL_OTHER_PROCESSES_EVERY_MS, startLoop } from './loop.ts';
import { type Metrics, startMetrics } from './metrics/metrics.ts';
import { createReadiness } from './readiness.ts';
import { openForWriting } from './store/database.ts';
import { lockForServing, lockPath, refuseOtherMachine } from './store/lock.ts';
import { refuseOtherNames } from './store/other-names.ts';
import { realPath, watchPlace } from './store/place.ts';
import { createPruner } from './store/pruner.ts';
import { startStoreThread } from './store/store.ts';
import { writerFigures } from './store/writer-figures.ts';
import { openFilesProblem, ownFilesProblem, processesProblem, spareFiles } from './system-limits.ts';

export interface Service {
  /** Where it listens, with the port that it got. */
  url: string;
  /** Where its metrics are; null: nowhere. */
  metricsUrl: string | null;
  /** Reads certificates and keys anew. What is wrong with them is logged, and those that are in use stay. */
  reload(): void;
  /** Lets running commands and attempts end, within their limits, and closes the file. */
  stop(): Promise<void>;
}

/** No more than a bound: the pruner itself says when its next step is due. */
const PRUNING_IDLE_MS = 60_000;
const KILL_GRACE_MS = 10_000;
const LAST_REQUESTS_MS = 1_500;
/** hapi ends at once all connections that carry no request: whoever has just sent one would wait in vain for its answer. */
const ON_THE_WAY_MS = 50;
/** Whatever can be ended is ended by then. For what cannot, or not be recorded on a full disk, the API does not wait. */
export const RECOVERY_WAIT_MS = 20_000;
const LEFT_PROBLEM =
  'what an earlier run left running is not ended and recorded yet: no deployment starts before it is';

/**
 * Puts davit together and starts it: the file and its lock, the writer, what a crash left behind, the
 * dispatcher, the executor, HTTP. What was started is stopped in the opposite order.
 * Throws AppError for what the user can mend; `onFatal` is called when something dies that all stands on. Whoever aborts
 * `toldToStop` before it serves has it throw the signal's reason, with all stopped.
 */
export async function startService(
  config: ServeConfig,
  effects: Effects,
  onFatal: (error: unknown) => void,
  toldToStop: AbortSignal = new AbortController().signal,
): Promise<Service> {
  const fewOfSystem = processesProblem() ?? ownFilesProblem(config.maxConcurrent);
  if (fewOfSystem !== undefined) throw new AppError('conflict', fewOfSystem);
  await using started = new AsyncDisposableStack();
  // First of all: to load it takes as long as all that is done before it is needed.
  const storeThread = startStoreThread(onFatal);
  started.defer(storeThread.end);
  const log = { level: config.logLevel, form: logFormOf(process.stderr) };
  const logger = createLogger(log, effects);
  const certificates = certificatesOf(config, effects, logger);
  const certificate = certificates.own();
  const caPem = certificates.authorities();
  const { dbPath } = config;

  requireOwnProc();
  refuseOtherMachine(dbPath);
  refuseOtherNames(dbPath);
  const isNew = !existsSync(dbPath);
  refuseRemovedLock(dbPath);
  openForWriting(dbPath, effects).close(); // so that what is wrong with the file is said here, in plain words
  started.defer(lockForServing(dbPath, process.pid, effects, config.maxConcurrent));

  const fewFiles = openFilesProblem(config.maxConcurrent);
  if (fewFiles !== undefined) logger.warn(fewFiles);
  const hiddenProcesses = hiddenProcessesProblem();
  if (hiddenProcesses !== undefined) logger.warn(hiddenProcesses);

  const doorForDispatcher = new MessageChannel();
  const figures =
    config.metricsListen === null ? undefined : { writer: figuresMemory(), dispatcher: figuresMemory() };
  const [store, { createApi }, posix] = await Promise.all([
    storeThread.open(dbPath, [doorForDispatcher.port1], figures?.writer),
    import('./http/api.ts'),
    loadPosix(),
  ]);
  started.defer(store.close);
  const temporaryDirectory = resolve(tmpdir());
  const noParent = parentProblem(temporaryDirectory);
  // Where others do all the work, a machine that is read-only but for the file will do.
  if (noParent !== undefined && store.reads.projects.list().some(({ command }) => command !== null))
    throw new AppError('conflict', noParent);
  // The first process of a container is given orphans without having asked for them.
  const adopts = posix.adoptOrphans() || process.pid === 1;
  const spawner = createSpawner(posix, effects, adopts);
  started.defer(spawner.close);
  const dispatcher = startDispatcherThread(onFatal, effects);
  started.defer(dispatcher.stop);

  // Before the recovery, so that what it ends counts.
  let metrics: Metrics | undefined;
  if (config.metricsListen !== null && figures !== undefined) {
    metrics = await startMetrics({
      listen: config.metricsListen,
      reads: store.reads,
      dbPath,
      figures: [...writerFigures(figures.writer).all, ...deliveryFigures(figures.dispatcher).all],
      commandSlots: config.maxConcurrent,
      effects,
      logger,
    });
    started.defer(metrics.close);
  }

  const workspaces = createWorkspaces({
    parent: temporaryDirectory,
    lockPath: lockPath(dbPath),
    hasOrphans: () => !adopts || hasOrphans(),
    effects,
    logger,
  });
  started.defer(workspaces.close);
  const recovery = recover(store, {
    killGraceMs: KILL_GRACE_MS,
    workspaces,
    lockPath: lockPath(dbPath),
    effects,
    logger,
  });
  let recovered = await isWithin(recovery, RECOVERY_WAIT_MS, toldToStop, effects);
  toldToStop.throwIfAborted();
  if (!recovered) logger.error(LEFT_PROBLEM);

  // Nobody waits for it to begin; if it cannot, onFatal hears of it.
  void dispatcher.begin({
    path: dbPath,
    port: doorForDispatcher.port2,
    sender: {
      version,
      timeoutMs: config.webhookTimeoutMs,
      allowHttp: config.webhookAllowHttp,
      allowedCidrs: config.webhookAllowCidrs,
      refusedAddresses: [config.listen, ...(metrics === undefined ? [] : [metrics.listen])],
      caPem,
      idleConnectionsMax: spareFiles(config.maxConcurrent),
    },
    schedule: { delaysMs: config.webhookRetryDelaysMs, windowMs: config.webhookRetryWindowMs },
    log,
    figures: figures?.dispatcher,
  });

  const executor = createExecutor({
    store,
    spawner,
    effects,
    logger,
    maxConcurrent: config.maxConcurrent,
    killGraceMs: KILL_GRACE_MS,
    workspaces,
  });
  const stopping = new AbortController();
  const readiness = createReadiness({
    isInPlace: watchPlace(dbPath, effects),
    probe: () => store.writer.write('instance.probe', undefined),
    problem: () => (recovered ? null : LEFT_PROBLEM),
    dispatcherQuietMs: dispatcher.quietMs,
    stopping: stopping.signal,
    effects,
  });
  const watches = createWatches(store, effects);
  const http = await createApi(
    {
      config,
      store,
      watches,
      ping: dispatcher.ping,
      checkReadiness: readiness.check,
      tls: certificate,
      onAnswer: metrics?.onAnswer,
      stopping: stopping.signal,
    },
    effects,
    logger,
  );
  started.defer(async () => {
    await delay(ON_THE_WAY_MS, effects);
    await http.stop({ timeout: LAST_REQUESTS_MS });
  });
  // Closed before the server: requests that wait for a commit are answered then, and hold up no stop.
  started.defer(watches.close);
  await http.start();
  if (isNew) logger.info({ file: resolve(dbPath) }, 'made the file: it has no keys and no projects yet');

  const loop = startLoop(async () => (recovered ? executor.tick() : null), {
    idleMs: POLL_OTHER_PROCESSES_EVERY_MS,
    effects,
    onError: stumbled(logger, 'the executor stumbled'),
  });
  store.writer.onCommit((changes) => {
    if (changes.has('queue')) loop.wake();
  });
  const reportsLoop = startLoop(createOverdue(store, effects), {
    idleMs: POLL_OTHER_PROCESSES_EVERY_MS,
    effects,
    onError: stumbled(logger, 'overdue reports could not be ended'),
  });
  const clockSettings = createClockSettings(store.reads.instance.clockSettings(effects.now()));
  const { retentionMs } = config;
  const pruner = createPruner({ writer: store.writer, effects, logger, clockSettings, retentionMs });
  const pruning = startLoop(pruner.tick, {
    idleMs: PRUNING_IDLE_MS,
    effects,
    onError: (error) => logger.error({ err: error }, 'what is over could not be removed'),
  });
  readiness.watch(loop);
  if (!recovered) {
    recovery.then(
      () => {
        recovered = true;
        loop.wake();
      },
      (error: unknown) => stopping.signal.aborted || onFatal(error),
    );
  }
  started.defer(async () => {
    stopping.abort();
    await Promise.all([reportsLoop.stop(), pruning.stop()]);
    // The loop hands on who is canceled meanwhile.
    await executor.stop(config.shutdownGraceMs);
    await loop.stop();
  });

  const running = started.move();
  return {
    url: urlOf(config, Number(http.info.port)),
    metricsUrl: metrics?.url ?? null,
    reload() {
      certificates.renew('the certificate', certificates.own, (renewed) => {
        if (http.listener instanceof TlsListener) replaceCertificate(http.listener, renewed);
      });
      certificates.renew('the certificates of --webhook-ca-file', certificates.authorities, dispatcher.trust);
      if (certificate === null && caPem === null) logger.info('there are no certificates to read anew');
    },
    stop: () => running.disposeAsync(),
  };
}

/** A service whose lock somebody took for a leftover serves on, and another lock in its place keeps nobody out. */
function refuseRemovedLock(dbPath: string): void {
  const lock = lockPath(dbPath);
  // Of what was served and ended well only the lock is left. The look takes 5 ms, and more beside many processes.
  const mayBeServed = existsSync(`${realPath(dbPath)}-shm`) || (existsSync(dbPath) && !existsSync(lock));
  if (!mayBeServed) return;
  const [holder] = holdersOf(`${lock} (deleted)`); // proc_pid_fd(5)
  if (holder === undefined) return;
  throw new AppError(
    'conflict',
    `${dbPath} is served already by process ${holder}, whose lock was removed: stop that one first, or serve another file`,
  );
}

function urlOf({ listen, tls }: ServeConfig, port: number): string {
  return `${tls === null ? 'http' : 'https'}://${listenText({ ...listen, port })}`;
}

/** For a loop whose tick threw: a database that takes no writes is a warning, as davit cannot mend it; all else is a bug. */
function stumbled(logger: Logger, message: string): (error: unknown) => void {
  return (error) => {
    if (isUnavailable(error)) logger.warn({ reason: messageOf(error) }, message);
    else logger.error({ err: error }, message);
  };
}

/** Whether it resolves within so long, and before `signal` is aborted. Rejects as it does. */
function isWithin(
  work: Promise<void>,
  limitMs: number,
  signal: AbortSignal,
  effects: Effects,
): Promise<boolean> {
  const aborted = new Promise<false>((resolve) => {
    if (signal.aborted) resolve(false);
    signal.addEventListener('abort', () => resolve(false), { once: true });
  });
  return Promise.race([work.then(() => true), delay(limitMs, effects).then(() => false), aborted]);
}
