import { once } from 'node:events';
import { existsSync, statSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { Server as TlsListener } from 'node:tls';
import { MessageChannel } from 'node:worker_threads';
import { version } from './assets.ts';
import { createClockHistory } from './clock.ts';
import { listenText, type ServeConfig } from './config.ts';
import { startDispatcherThread } from './deliver/dispatcher-port.ts';
import { deliveryMetrics } from './deliver/metrics.ts';
import { createExecutor } from './deploy/executor.ts';
import { createOverdue } from './deploy/overdue.ts';
import { loadPosix } from './deploy/posix.ts';
import { recover } from './deploy/recover.ts';
import { createSpawner } from './deploy/spawner.ts';
import { createWorkspaces, parentProblem } from './deploy/workspace.ts';
import { delay, type Effects } from './effects.ts';
import { AppError, isUnavailable, messageOf } from './errors.ts';
import { certificatesOf } from './http/certificates.ts';
import { replaceCertificate } from './http/tls.ts';
import { createWatches } from './http/watches.ts';
import { createLogger, type Logger, logFormOf } from './logger.ts';
import { type Loop, POLL_OTHER_PROCESSES_EVERY_MS, startLoop } from './loop.ts';
import { newMetricsMemory } from './metric-cells.ts';
import { type Metrics, startMetrics } from './metrics/metrics.ts';
import { realPath } from './paths.ts';
import { hasOrphans, hiddenProcessesProblem, requireOwnProc } from './proc.ts';
import { createReadiness } from './readiness.ts';
import {
  createStopTime,
  LAST_ATTEMPTS_MS,
  LAST_RECOVERY_MS,
  LAST_REMOVALS_MS,
  LAST_REQUESTS_MS,
} from './stop-time.ts';
import { openForWriting, SCHEMA_VERSION } from './store/database.ts';
import { lockForServing } from './store/lock.ts';
import { networkProblem } from './store/mounts.ts';
import { areInPlace, exposureProblem, identifyFiles, lockPath, sharedMemoryPath } from './store/place.ts';
import { createPruner } from './store/pruner.ts';
import { type Store, startWriterThread } from './store/store.ts';
import { walBytesOf } from './store/wal.ts';
import { writerMetrics } from './store/writer-metrics.ts';
import {
  fileSizeProblem,
  lookupThreads,
  openFilesProblem,
  ownFilesProblem,
  processesProblem,
  reservedMemoryProblem,
  spareFiles,
  startPool,
} from './system-limits.ts';

export interface Service {
  /** The address that it listens on, with the port that it got. */
  url: string;
  /** The address of its metrics; null: metrics are off. */
  metricsUrl: string | null;
  /** Reads the certificates and keys again. If they are invalid, that is logged, and the current ones stay in use. */
  reload(): void;
  /** Lets the recovery, running commands and attempts end, each within its limit, and closes the file. */
  stop(): Promise<void>;
}

/** When hapi stops, it closes idle connections at once: a request that was just sent on one would get no answer. */
export const REQUESTS_IN_FLIGHT_MS = 50;
/** Only an upper bound: the pruner itself returns when its next step is due. */
const PRUNING_IDLE_MS = 60_000;
const KILL_GRACE_MS = 10_000;
/** By then every process that can be killed is gone. The API does not wait for others, nor for a full disk. */
export const RECOVERY_WAIT_MS = 20_000;
const WAL_STAYS =
  'the -wal stays, and may hold a part of the file: keep them together (another process has the file open, the disk is ' +
  'full, or the file was moved)';
const RECOVERY_PROBLEM =
  'deployments that an earlier run left running are not ended and recorded yet: no deployment starts until they are';

/**
 * Wires davit together and starts it: the file and its lock, the writer, crash recovery, the dispatcher, the executor,
 * HTTP. What was started is stopped in reverse order. The file must have passed `migrateOlder`. Throws AppError for
 * problems that the user can solve. `onFatal` is called when a part dies that davit cannot work without. If
 * `toldToStop` is aborted before the first deployment can start, everything is stopped after the recovery, or its time,
 * and the signal's reason is thrown.
 */
export async function startService(
  config: ServeConfig,
  effects: Effects,
  onFatal: (error: unknown) => void,
  toldToStop: AbortSignal = new AbortController().signal,
): Promise<Service> {
  refuseTightLimits(config);
  const lookupsMax = lookupThreads();
  await startPool();
  const stopTime = createStopTime(effects);
  await using started = new AsyncDisposableStack();
  // First, as loading the thread takes as long as everything that is done before it is needed.
  const writerThread = startWriterThread(onFatal);
  started.defer(writerThread.end);
  const log = { level: config.logLevel, form: logFormOf(process.stderr) };
  const logger = createLogger(log, effects);
  const certificates = certificatesOf(config, effects, logger);
  const certificate = certificates.own();
  const caPem = certificates.authorities();
  const { dbPath } = config;

  requireOwnProc();
  const isNew = !existsSync(dbPath);
  openForWriting(dbPath, effects).close(); // problems with the file are thrown here, as an AppError
  started.defer(lockForServing(dbPath, process.pid, effects, config.maxConcurrent));

  for (const warning of warningsAtStart(config)) logger.warn(warning);

  const dispatcherToWriter = new MessageChannel();
  const metricsMemory =
    config.metricsListen === null
      ? undefined
      : { writer: newMetricsMemory(), dispatcher: newMetricsMemory() };
  const [store, { createApi }, posix] = await Promise.all([
    writerThread.open(dbPath, [dispatcherToWriter.port1], metricsMemory?.writer),
    import('./http/api.ts'),
    loadPosix(),
  ]);
  // Before the recovery, which may take long: by its end the path may lead to another file than the writer has open.
  const files = identifyFiles(dbPath);
  started.defer(() => {
    const walBytes = walBytesOf(dbPath);
    if (walBytes > 0) logger.info({ file: dbPath, wal_bytes: walBytes }, WAL_STAYS);
  });
  started.defer(store.close);
  const temporaryDirectory = tmpdir();
  refuseWithoutTemporaryFiles(temporaryDirectory, store);
  // The first process of a PID namespace inherits orphans even without being a subreaper.
  const adopts = posix.becomeSubreaper() || process.pid === 1;
  const spawner = createSpawner(posix, effects, adopts);
  started.defer(spawner.close);
  const dispatcher = startDispatcherThread(onFatal, effects);
  started.defer(() => dispatcher.stop(stopTime.atMost(LAST_ATTEMPTS_MS)));

  // Before the recovery, so that the deployments that it ends are counted.
  const metrics = await startMetricsOf(config, metricsMemory, store, effects, logger);
  if (metrics !== undefined) started.defer(metrics.close);

  const workspaces = createWorkspaces({
    parent: temporaryDirectory,
    lockPath: lockPath(dbPath),
    hasOrphans: () => !adopts || hasOrphans(),
    effects,
    logger,
  });
  started.defer(() => workspaces.close(stopTime.atMost(LAST_REMOVALS_MS)));
  await tryListening(config.listen);
  const recovery = recover(store, {
    killGraceMs: KILL_GRACE_MS,
    workspaces,
    sharedMemoryPath: sharedMemoryPath(dbPath),
    effects,
    logger,
  });
  let recovered = await isWithin(recovery, RECOVERY_WAIT_MS, effects);
  if (!recovered) logger.error(RECOVERY_PROBLEM);
  await stopIfTold();

  // Not awaited: if the dispatcher cannot begin, onFatal is called.
  void dispatcher.begin({
    path: dbPath,
    files,
    port: dispatcherToWriter.port2,
    sender: {
      timeoutMs: config.webhookTimeoutMs,
      allowHttp: config.webhookAllowHttp,
      allowedCidrs: config.webhookAllowCidrs,
      refusedAddresses: [config.listen, ...(metrics === undefined ? [] : [metrics.listen])],
      caPem,
      idleConnectionsMax: spareFiles(config.maxConcurrent),
      lookupsMax,
    },
    schedule: { delaysMs: config.webhookRetryDelaysMs, windowMs: config.webhookRetryWindowMs },
    log,
    metricsMemory: metricsMemory?.dispatcher,
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
    isInPlace: () => areInPlace(files),
    probe: () => store.writer.write('instance.probe', undefined),
    problem: () => (recovered ? null : RECOVERY_PROBLEM),
    dispatcherQuietMs: dispatcher.quietMs,
    stopping: stopping.signal,
    effects,
  });
  const watches = createWatches(store.writer, effects);
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
    await delay(REQUESTS_IN_FLIGHT_MS, effects);
    await http.stop({ timeout: stopTime.atMost(LAST_REQUESTS_MS) });
  });
  // Stopped before the server: that answers the requests that wait for a deployment, so they do not delay the stop.
  started.defer(watches.close);
  await http.start();
  await stopIfTold();
  // Only now, as a start that is refused has one line, which says why.
  logger.info({ version, schema_version: SCHEMA_VERSION, file: dbPath }, 'started');
  if (isNew) logger.info({ file: dbPath }, 'created the file: it has no keys and no projects yet');

  const loop = startLoop(async () => (recovered ? executor.tick() : null), {
    idleMs: POLL_OTHER_PROCESSES_EVERY_MS,
    effects,
    onError: tickErrorLogger(logger, 'the executor failed, and tries again'),
  });
  store.writer.onCommit((changes) => {
    if (changes.has('queue')) loop.wake();
  });
  const upkeep = startUpkeep(store, config, effects, logger);
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
    // The executor's loop still runs: it has deployments stopped that are canceled meanwhile. The others may just wait for
    // a write, which must not delay the SIGTERM of commands.
    await Promise.all([executor.stop(config.shutdownGraceMs), ...upkeep.map(({ stop }) => stop())]);
    await loop.stop();
    await isWithin(recovery, stopTime.atMost(LAST_RECOVERY_MS), effects);
  });

  const running = started.move();
  return {
    url: urlOf(config, Number(http.info.port)),
    metricsUrl: metrics?.url ?? null,
    reload() {
      certificates.renewOwn((renewed) => {
        if (http.listener instanceof TlsListener) replaceCertificate(http.listener, renewed);
      });
      certificates.renewAuthorities(dispatcher.trust);
      if (certificate === null && caPem === null) logger.info('there are no certificates to reload');
    },
    stop() {
      stopTime.begin();
      return running.disposeAsync();
    },
  };

  async function stopIfTold(): Promise<void> {
    // The steps before may have left the event loop no turn, in which a signal is seen; the first one may be half over.
    await nextTurn();
    await nextTurn();
    if (!toldToStop.aborted) return;
    await isWithin(recovery, stopTime.atMost(LAST_RECOVERY_MS), effects);
    toldToStop.throwIfAborted();
  }
}

/** Throws AppError `conflict` if the system allows davit too little to run at all. */
function refuseTightLimits({ maxConcurrent }: ServeConfig): void {
  const limitProblem = processesProblem() ?? ownFilesProblem(maxConcurrent) ?? reservedMemoryProblem();
  if (limitProblem !== undefined) throw new AppError('conflict', limitProblem);
}

/** Of what davit runs with, but may not do well with. */
function warningsAtStart({ dbPath, maxConcurrent }: ServeConfig): string[] {
  const network = networkProblem(dbPath);
  const exposure = exposureProblem(realPath(dbPath), statSync(dbPath).mode);
  const warnings = [
    openFilesProblem(maxConcurrent),
    fileSizeProblem(),
    network && `${network.message}: ${network.advice}`,
    // Its -wal and -shm are made with its mode, and keep that until the last process closes the file.
    exposure && `${exposure.message}: stop davit, ${exposure.advice}, and start it again`,
    hiddenProcessesProblem(),
  ];
  return warnings.filter((warning) => warning !== undefined);
}

/**
 * Without projects that have a command, davit needs no temporary directory: the file may be all it can write to. Throws
 * AppError `conflict` if it needs one that it cannot use.
 */
function refuseWithoutTemporaryFiles(directory: string, { reads }: Store): void {
  const noFiles = parentProblem(directory);
  if (noFiles?.mayPass === false && reads.projects.list().some(({ command }) => command !== null))
    throw new AppError('conflict', `${noFiles.message}: ${noFiles.advice}`);
}

/** Undefined: metrics are off. `memory`: where the other threads count. */
function startMetricsOf(
  { metricsListen, dbPath, maxConcurrent }: ServeConfig,
  memory: { writer: SharedArrayBuffer; dispatcher: SharedArrayBuffer } | undefined,
  { reads }: Store,
  effects: Effects,
  logger: Logger,
): Promise<Metrics> | undefined {
  if (metricsListen === null || memory === undefined) return undefined;
  return startMetrics({
    listen: metricsListen,
    reads,
    dbPath,
    metrics: [...writerMetrics(memory.writer).all, ...deliveryMetrics(memory.dispatcher).all],
    commandSlots: maxConcurrent,
    effects,
    logger,
  });
}

/**
 * Listens for less than a millisecond, so that no connection is accepted. Davit that is refused its place has then ended
 * no command of another davit, as on a copy of its file, and sent nothing.
 */
async function tryListening({ host, port }: ServeConfig['listen']): Promise<void> {
  const trial = createServer().listen(port, host);
  await once(trial, 'listening');
  trial.close();
  await once(trial, 'close');
}

/** The loops that end what nobody reports, and remove what has expired. */
function startUpkeep(store: Store, { retentionMs }: ServeConfig, effects: Effects, logger: Logger): Loop[] {
  const reports = startLoop(createOverdue(store, effects), {
    idleMs: POLL_OTHER_PROCESSES_EVERY_MS,
    effects,
    onError: tickErrorLogger(logger, 'deployments whose report is overdue could not be ended'),
  });
  const clockHistory = createClockHistory(store.reads.instance.clockSettings(effects.now()));
  const pruner = createPruner({ writer: store.writer, effects, logger, clockHistory, retentionMs });
  const pruning = startLoop(pruner.tick, {
    idleMs: PRUNING_IDLE_MS,
    effects,
    onError: (error) => logger.error({ err: error }, 'retention could not remove what has expired'),
  });
  return [reports, pruning];
}

function urlOf({ listen, tls }: ServeConfig, port: number): string {
  return `${tls === null ? 'http' : 'https'}://${listenText({ ...listen, port })}`;
}

/**
 * Logs the error of a tick: as a warning if the database takes no writes, which is no fault of davit; else as a bug.
 */
function tickErrorLogger(logger: Logger, message: string): (error: unknown) => void {
  return (error) => {
    if (isUnavailable(error)) logger.warn({ reason: messageOf(error) }, message);
    else logger.error({ err: error }, message);
  };
}

/** Whether `work` resolves within `limitMs`. Rejects if `work` does. */
function isWithin(work: Promise<void>, limitMs: number, effects: Effects): Promise<boolean> {
  return Promise.race([work.then(() => true), delay(limitMs, effects).then(() => false)]);
}
