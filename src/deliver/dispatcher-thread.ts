import { type MessagePort, parentPort } from 'node:worker_threads';
import type { WebhookId } from '../domain.ts';
import { delay, realEffects } from '../effects.ts';
import { isStorageProblem } from '../errors.ts';
import { watchLag } from '../event-loop.ts';
import { createLogger } from '../logger.ts';
import { POLL_OTHER_PROCESSES_EVERY_MS, startLoop } from '../loop.ts';
import { keepYoungWhatIsNew, releaseStartMemory } from '../memory.ts';
import { openInPlace } from '../store/place.ts';
import { openReads } from '../store/store.ts';
import { connectWriter } from '../store/writer-port.ts';
import { createDispatcher } from './dispatcher.ts';
import type { DispatcherThreadData, FromDispatcherThread, ToDispatcherThread } from './dispatcher-port.ts';
import { deliveryMetrics } from './metrics.ts';
import { createPinger } from './ping.ts';
import { createReplayer } from './replays.ts';
import { createSender } from './send.ts';

/*
 * The dispatcher has a thread of its own: in the one that accepts requests, the p99 of accepting a deployment rises from
 * 13 ms to over 300 ms while deliveries run flat out.
 */

/** How long the results of the last attempts may take to be recorded: as a rule one commit. */
const LAST_RESULTS_MS = 500;

/**
 * The gap between two ticks of the replays that recorded attempts wake, as those may come some hundred times a second
 * and finding 500 replays busy takes 10 ms. Meanwhile each has up to 500 deliveries due to go on with.
 */
const REPLAYS_WAKE_GAP_MS = 50;

if (parentPort === null) throw new Error('dispatcher-thread.ts runs as a worker thread');

const owner = parentPort;
owner.once('message', (message: ToDispatcherThread) => {
  if (message.kind === 'begin') dispatch(owner, message.data);
  // Stopped before `begin`, because another part of davit could not start.
  else owner.postMessage({ kind: 'stopped' } satisfies FromDispatcherThread);
});

function dispatch(owner: MessagePort, data: DispatcherThreadData): void {
  const { path, files, port, sender: senderOptions, schedule, log, metricsMemory } = data;
  const metrics = metricsMemory && deliveryMetrics(metricsMemory);
  const logger = createLogger(log, realEffects);
  // If the path led to another file, its deliveries would be sent.
  const opened = openInPlace(files, () => openReads(path));
  if (opened === undefined) {
    port.close();
    owner.postMessage({ kind: 'moved' } satisfies FromDispatcherThread);
    return;
  }
  const { reads, close: closeReads } = opened;
  const writer = connectWriter(port);
  const sender = createSender(senderOptions, realEffects);
  const dispatcher = createDispatcher({
    reads,
    writer,
    sender,
    schedule,
    effects: realEffects,
    logger,
    metrics,
    wake: () => loop.wake(),
  });
  const loop = startLoop(dispatcher.tick, {
    idleMs: POLL_OTHER_PROCESSES_EVERY_MS,
    effects: realEffects,
    onError: (error) => logger.error({ err: error }, 'the dispatcher failed, and tries again'),
  });
  const replayer = createReplayer(reads, writer, realEffects);
  const replays = startLoop(replayer.tick, {
    idleMs: POLL_OTHER_PROCESSES_EVERY_MS,
    effects: realEffects,
    onError: (error) => logger.error({ err: error }, 'the replays failed, and are tried again'),
  });
  let isReplaysWakeScheduled = false;
  const pinger = createPinger(reads, sender, realEffects);
  if (metrics !== undefined) watchLag(metrics.lag, realEffects);

  writer.onCommit((changes) => {
    if (changes.has('outbox') || changes.has('everything')) replays.wake();
    // A replay goes on when its receiver has taken enough.
    else if (changes.has('settled')) wakeReplaysSoon();
  });
  owner.on('message', (message: ToDispatcherThread) => {
    if (message.kind === 'quietMs')
      owner.postMessage({ kind: 'quietMs', quietMs: loop.quietMs() } satisfies FromDispatcherThread);
    else if (message.kind === 'stop') void stop(message.graceMs);
    else if (message.kind === 'trust') sender.trust(message.caPem);
    else if (message.kind === 'ping') void ping(message);
  });
  owner.postMessage({ kind: 'ready' } satisfies FromDispatcherThread);
  releaseStartMemory(realEffects, 'thread');
  keepYoungWhatIsNew();

  function wakeReplaysSoon(): void {
    if (isReplaysWakeScheduled) return;
    isReplaysWakeScheduled = true;
    realEffects.after(REPLAYS_WAKE_GAP_MS, () => {
      isReplaysWakeScheduled = false;
      replays.wake();
    });
  }

  async function ping({ pingId, webhookId }: { pingId: number; webhookId: WebhookId }): Promise<void> {
    const result = await pinger.ping(webhookId).catch((error) => {
      logger.error({ err: error, webhook_id: webhookId }, 'a ping went wrong');
      return isStorageProblem(error) ? 'unreadable' : null;
    });
    owner.postMessage({ kind: 'pinged', pingId, result } satisfies FromDispatcherThread);
  }

  /** Lets attempts that are under way end if they do so in time, so that a clean stop sends nothing twice. */
  async function stop(graceMs: number): Promise<void> {
    await Promise.all([loop.stop(), replays.stop()]);
    await Promise.race([dispatcher.settled(), delay(graceMs, realEffects)]);
    sender.close();
    // Answers of which only the body was awaited count.
    await Promise.race([dispatcher.settled(), delay(LAST_RESULTS_MS, realEffects)]);
    closeReads();
    port.close();
    logger.flush(); // the thread is terminated, and sees no exit
    owner.postMessage({ kind: 'stopped' } satisfies FromDispatcherThread);
  }
}
