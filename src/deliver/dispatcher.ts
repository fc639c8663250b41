import { createClockHistory, createWatchedClock } from '../clock.ts';
import type { WebhookId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import { createSlots } from '../slots.ts';
import { type Change, enabledWebhookOf, webhookOf } from '../store/changes.ts';
import type { Claim, DueDelivery } from '../store/outbox.ts';
import {
  DISABLE_AFTER_FAILING_MS,
  FAILING_RESTARTS_AFTER_MS,
  type SettledAndDisabled,
  type Settlement,
} from '../store/settlements.ts';
import type { Reads } from '../store/store.ts';
import { type Writer, writePersistently } from '../store/writer.ts';
import { createLanes, type Lane, type Turn } from './lanes.ts';
import type { DeliveryMetrics } from './metrics.ts';
import { createRescheduling } from './rescheduling.ts';
import { nextAttempt, type RetrySchedule } from './retry.ts';
import type { Sender, SendOutcome } from './send.ts';
import { signedHeaders } from './sign.ts';

export interface DispatcherOptions {
  reads: Reads;
  writer: Writer;
  sender: Sender;
  schedule: RetrySchedule;
  effects: Effects;
  logger: Logger;
  /** Counts what it does. */
  metrics?: DeliveryMetrics | undefined;
  /** Called when there may be work for `tick` earlier than it returned. */
  wake?: () => void;
}

export interface Dispatcher {
  /** Begins every attempt that is due and has a slot. Resolves to when the next one is due; null: none is known. */
  tick(): Promise<number | null>;
  /** Resolves when no attempt is under way, and the results of all are recorded. */
  settled(): Promise<void>;
}

/** How many attempts one tick begins at most; beginning one takes about 60 µs. */
const BATCH_MAX = 64;

/**
 * The batches of attempts for webhooks with a backlog, which are not urgent, are sized so that all work between two
 * ticks, mostly the handling of answers, takes about this long. So a new event waits no longer, whatever the answers of
 * others cost: one in tiny chunks costs 1.4 ms, a common one 0.1 ms.
 */
const LATENCY_TARGET_MS = 5;
const BACKLOG_BATCH_MIN = 2;

/** How often all pending webhooks are read again, as a safeguard: commits report every change of one. */
const RESCAN_EVERY_MS = 60_000;

/**
 * Drains the outbox: claim, sign, send, settle. Due deliveries are rows, attempts under way are only in memory: after a
 * crash between sending and settling a delivery is sent again, which receivers can tell by the event's id. Which
 * webhooks have something due is kept in memory too, updated by what commits report: reading them all at each commit
 * would take 25 ms with ten thousand webhooks that wait for a retry.
 */
export function createDispatcher(options: DispatcherOptions): Dispatcher {
  const { reads, writer, sender, schedule, effects, logger, metrics } = options;
  const lanes = createLanes(effects, reads.outbox.history);
  const startedAtMs = effects.now();
  const clockHistory = createClockHistory(reads.instance.clockSettings(startedAtMs));
  const rescheduling = createRescheduling({ reads, writer, schedule, effects, logger, track });
  const now = createWatchedClock(effects, (byMs, atMs) => {
    clockHistory.add(byMs, atMs);
    rescheduling.followClock({ atMs, byMs });
  });
  const running = createSlots<Promise<void>>();
  /** Those that commits have reported since the last tick. */
  let changedWebhooks: WebhookId[] = [];
  let isRescanDue = true;
  let rescannedAtMs = 0;
  let backlogBatch = BATCH_MAX;
  /** When the first wake since the last tick was. */
  let wokenAtMs: number | undefined;

  writer.onCommit(noteChanges);
  const setBackMs = reads.instance.setBackMs(startedAtMs);
  if (setBackMs > 0) rescheduling.followClock({ atMs: startedAtMs, byMs: -setBackMs });

  return { tick, settled };

  async function tick(): Promise<number | null> {
    try {
      return dispatch(now());
    } catch (error) {
      // Some turns may have been lost.
      isRescanDue = true;
      throw error;
    }
  }

  function dispatch(nowMs: number): number | null {
    adaptBacklogBatch();
    const changed = changedWebhooks;
    changedWebhooks = [];
    for (const webhookId of changed) lanes.schedule(webhookId, nowMs, nowMs);
    if (isRescanDue || effects.monotonicMs() - rescannedAtMs > RESCAN_EVERY_MS) rescan(nowMs);
    const turns = lanes.turns(nowMs, BATCH_MAX, backlogBatch);
    if (turns.length === 0) return lanes.nextTurnAtMs(nowMs);
    claim(turns, nowMs);
    return nowMs;
  }

  function claim(turns: readonly Turn[], nowMs: number): void {
    const requests = turns.map(({ lane, slots }) => ({
      webhookId: lane.webhookId,
      limit: slots,
      underWay: lane.underWay,
      ahead: lane.ahead,
    }));
    reads.outbox.claim(requests, nowMs).forEach((claim, index) => {
      const lane = turns[index]?.lane;
      if (lane !== undefined) beginAttempts(lane, claim, nowMs);
    });
  }

  function beginAttempts(lane: Lane, { due, secrets, nextAtMs }: Claim, nowMs: number): void {
    for (const delivery of due) track(deliver(lane, delivery, secrets), 'an attempt could not be recorded');
    lanes.finishTurn(lane, nextAtMs, nowMs);
  }

  async function deliver(lane: Lane, delivery: DueDelivery, secrets: readonly string[]): Promise<void> {
    const atMs = now();
    const beganMs = effects.monotonicMs();
    const slot = lanes.begin(lane, delivery.seq, atMs);
    metrics?.began(delivery, lane.failures > 0, atMs);
    let isWithdrawn = false;
    const outcome = await sender.send({
      url: delivery.url,
      headers: headersOf(delivery, secrets, atMs),
      renewHeaders() {
        const sentAtMs = now();
        const secretsNow = secretsStillValid(delivery, sentAtMs);
        isWithdrawn = secretsNow === null;
        return secretsNow && headersOf(delivery, secretsNow, sentAtMs);
      },
      body: delivery.payload,
      key: lane.key,
    });
    const stopped = outcome.error === 'stopped';
    lanes.end(slot, stopped ? 'stopped' : outcome.ok ? 'succeeded' : 'failed', now());
    metrics?.ended();
    if (isWithdrawn) {
      // A claim that came while it was under way has skipped it.
      lanes.recorded(slot, now());
      lanes.schedule(lane.webhookId, now(), now());
    }
    wake();
    // It does not count as an attempt, and is made again at the next start, or by a claim if it was withdrawn.
    if (stopped) return;

    const elapsedMs = effects.monotonicMs() - beganMs;
    // Without the part of a millisecond by which `now` is behind: else a delivery could be dated before its attempt.
    const setMs = Math.trunc(now() - atMs - elapsedMs);
    // By the clock as it is now, which may have been set meanwhile: what was settled before is dated so, too.
    const endedAtMs = atMs + outcome.durationMs + setMs;
    const settlement = settlementOf(delivery, { atMs, endedAtMs }, outcome);
    logAttempt(settlement, delivery);
    // This retries while the disk is full. Any other failure is a bug, and then the delivery stays under way, so that it
    // is not sent over and over.
    const written = await writePersistently(writer, 'outbox.settle', settlement, effects);
    lanes.recorded(slot, now());
    if (typeof written === 'object') noteDisabled(lane, written);
    const settled = typeof written === 'object' ? written.delivery : written;
    metrics?.settled(settlement, settled);
    // A claim that came while it was under way has skipped it.
    if (settled === 'onNewerLadder') lanes.schedule(lane.webhookId, now(), now());
    else if (settlement.next.kind === 'retry') lanes.schedule(lane.webhookId, settlement.next.atMs, now());
    wake();
  }

  /**
   * What to sign with when a connection was established, which a receiver can delay by seconds after the claim. Null:
   * meanwhile the webhook was disabled, deleted or enabled again, has another url, or cannot be read.
   */
  function secretsStillValid(delivery: DueDelivery, nowMs: number): readonly string[] | null {
    try {
      const recipient = reads.outbox.recipient(delivery.webhook_id, nowMs);
      const isSame = recipient?.url === delivery.url && recipient.enabledAtMs === delivery.enabled_at;
      return isSame ? recipient.secrets : null;
    } catch (error) {
      logger.error({ err: error }, 'a webhook could not be read before sending to it');
      return null;
    }
  }

  /** Logs that the webhook was disabled with this attempt, as nothing else tells the operator. */
  function noteDisabled({ webhookId }: Lane, { disabledFor }: SettledAndDisabled): void {
    logger.warn({ webhook_id: webhookId, reason: disabledFor }, 'a webhook is disabled');
    metrics?.disabled();
  }

  /** What an attempt means for the delivery and for its webhook. */
  function settlementOf(
    delivery: DueDelivery,
    { atMs, endedAtMs }: { atMs: number; endedAtMs: number },
    outcome: SendOutcome,
  ): Settlement {
    const ladderAttempts = delivery.ladder_attempts + 1;
    // The 24 h of the ladder begin with its first attempt, usually when the event happens: a delivery that was held, or
    // that waited for davit or a failing receiver, still gets all its retries. One millisecond earlier, so that a
    // redelivery requested at the same time counts as newer.
    const ladderStartedAtMs =
      delivery.ladder_attempts === 0
        ? Math.max(delivery.ladder_started_at, atMs - 1)
        : delivery.ladder_started_at;
    const { statusCode, error, durationMs, remoteAddress, responseBody } = outcome;
    return {
      seq: delivery.seq,
      webhookId: delivery.webhook_id,
      url: delivery.url,
      enabledAtMs: delivery.enabled_at,
      attempt: {
        atMs,
        statusCode,
        error,
        durationMs,
        remoteAddress,
        responseBody,
        trigger: delivery.ladder_trigger,
      },
      endedAtMs,
      next: nextOf(outcome, ladderAttempts, ladderStartedAtMs),
      attemptCount: delivery.attempt_count + 1,
      ladderAttempts,
      ladderStartedAtMs,
      neverPassedMs: {
        inFiveDays: skippedMs(clockHistory.recent(DISABLE_AFTER_FAILING_MS, endedAtMs)),
        inThreeDays: skippedMs(clockHistory.recent(FAILING_RESTARTS_AFTER_MS, endedAtMs)),
      },
      disableReason: isGone(outcome) ? 'the receiver answered 410 Gone' : null,
    };
  }

  function nextOf(
    outcome: SendOutcome,
    ladderAttempts: number,
    ladderStartedAtMs: number,
  ): Settlement['next'] {
    if (outcome.ok) return { kind: 'delivered' };
    // It is held with the webhook, which this disables: also after the last attempt of its ladder.
    if (isGone(outcome)) return { kind: 'retry', atMs: now() };
    const nowMs = now();
    return nextAttempt({
      // Without time that never passed because the clock was set ahead, which must not cost retries.
      ladderStartedAtMs: ladderStartedAtMs + clockHistory.since(ladderStartedAtMs),
      isStartDoubtful: clockHistory.saidTwice(ladderStartedAtMs, schedule.windowMs, nowMs),
      ladderAttempts,
      nowMs,
      retryAfter: outcome.retryAfter,
      randomFraction: randomFraction(effects),
      schedule,
    });
  }

  /** Successes are logged at `debug`, as a line costs as much as signing does. */
  function logAttempt({ webhookId, attempt, next }: Settlement, { id, event_id }: DueDelivery): void {
    const { statusCode, error, durationMs } = attempt;
    const fields = {
      delivery_id: id,
      event_id,
      webhook_id: webhookId,
      status_code: statusCode,
      error,
      duration_ms: durationMs,
      next: next.kind,
    };
    logger[next.kind === 'delivered' ? 'debug' : 'info'](fields, 'delivery attempt');
  }

  /** Keeps `work` for `settled`, and logs its failure. Resolves when it has ended, also if it failed. */
  function track(work: Promise<unknown>, problem: string): Promise<void> {
    const ended = work
      .catch((error: unknown) => logger.error({ err: error }, problem))
      .then(() => void running.take(place));
    const place = running.put(ended);
    return ended;
  }

  async function settled(): Promise<void> {
    while (running.size > 0) await Promise.all(running);
  }

  function wake(): void {
    wokenAtMs ??= effects.monotonicMs();
    options.wake?.();
  }

  /** Additive increase, multiplicative decrease: it grows over some hundred ticks, and shrinks within a few. */
  function adaptBacklogBatch(): void {
    const waitedMs = wokenAtMs === undefined ? 0 : effects.monotonicMs() - wokenAtMs;
    wokenAtMs = undefined;
    backlogBatch =
      waitedMs > LATENCY_TARGET_MS
        ? Math.max(BACKLOG_BATCH_MIN, Math.floor(backlogBatch / 2))
        : Math.min(BATCH_MAX, backlogBatch + 1);
  }

  function noteChanges(changes: ReadonlySet<Change>): void {
    let isConcerned = false;
    for (const change of changes) {
      const webhookId = webhookOf(change);
      const enabledId = enabledWebhookOf(change);
      if (enabledId !== undefined) rescheduling.retryNow(enabledId);
      if (webhookId !== undefined) changedWebhooks.push(webhookId);
      else if (change === 'outbox' || change === 'everything') isRescanDue = true;
      else continue;
      isConcerned = true;
    }
    if (isConcerned) wake();
  }

  function rescan(nowMs: number): void {
    isRescanDue = false;
    rescannedAtMs = effects.monotonicMs();
    const pending = reads.outbox.pendingWebhooks();
    lanes.replace(pending, nowMs);
    rescheduling.catchUp(pending, nowMs);
  }
}

function headersOf(
  { event_id: eventId, payload: body }: DueDelivery,
  secrets: readonly string[],
  atMs: number,
) {
  return signedHeaders({ eventId, secrets, atSeconds: Math.floor(atMs / 1000), body });
}

/**
 * The most that the clock can have skipped since any moment: setting it back makes nothing older that happened after
 * that.
 */
function skippedMs(settings: readonly { byMs: number }[]): number {
  let sinceMs = 0;
  let mostMs = 0;
  for (const { byMs } of settings.toReversed()) {
    sinceMs += byMs;
    mostMs = Math.max(mostMs, sinceMs);
  }
  return mostMs;
}

function randomFraction(effects: Effects): number {
  const [high = 0, low = 0] = effects.randomBytes(2);
  return (high * 256 + low) / 65_536;
}

/** Whether the receiver wants no more deliveries: its webhook is disabled at once. */
function isGone({ statusCode }: SendOutcome): boolean {
  return statusCode === 410;
}
