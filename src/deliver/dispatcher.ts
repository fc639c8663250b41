import { createClockSettings, createWatchedClock } from '../clock.ts';
import type { WebhookId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import { createSlots } from '../slots.ts';
import { type Change, enabledWebhookOf, webhookOf } from '../store/context.ts';
import {
  type Claim,
  DISABLE_AFTER_FAILING_MS,
  type DueDelivery,
  type PendingPlace,
  type PendingWebhook,
  type Settled,
  type SettledLast,
  type Settlement,
} from '../store/outbox.ts';
import { inSteps } from '../store/steps.ts';
import type { Reads } from '../store/store.ts';
import { type Writer, writePersistently } from '../store/writer.ts';
import type { DeliveryFigures } from './figures.ts';
import { createLanes, FAILING_AFTER, type Lane, type Turn } from './lanes.ts';
import type { Reputation } from './resolver.ts';
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
  /** Told what it does. */
  figures?: DeliveryFigures | undefined;
  /** Called when there may be work for `tick` before the moment that it returned. */
  wake?: () => void;
}

export interface Dispatcher {
  /** Begins every attempt that is due and has a slot. Returns when the next one is due; null: none is known. */
  tick(): Promise<number | null>;
  /** Resolves when no attempt is under way and all that ended are recorded. */
  settled(): Promise<void>;
}

/** So many attempts are begun at a time; beginning one takes about 60 µs. */
const BEGUN_AT_ONCE_MAX = 64;

/**
 * Work of the kind that nothing waits for, the next attempts of webhooks that are behind, is begun in such portions
 * that all that happens between two looks, answers most of all, takes about this long. An event that is new waits
 * for no longer, whatever the answers of the others cost: one that never ends costs 0.7 ms where a common one costs 0.1.
 */
const BETWEEN_LOOKS_MS = 5;
const BEHIND_AT_ONCE_MIN = 2;

/** All pending webhooks are looked through that often, though every change of one is heard of. */
const LOOK_AT_ALL_EVERY_MS = 60_000;

/**
 * Drains the outbox: claim, sign, send, settle. What is under way is memory, what is due is rows; a crash
 * between sending and settling sends once more, and receivers tell by the event's id. Which webhooks have
 * something due is memory as well, kept by what commits report: with ten thousand webhooks that wait for
 * a retry, looking through them all at each commit would take 25 ms.
 */
export function createDispatcher(options: DispatcherOptions): Dispatcher {
  const { reads, writer, sender, schedule, effects, logger, figures } = options;
  const lanes = createLanes(effects, reads.outbox.history);
  const clockSettings = createClockSettings(reads.instance.clockSettings(effects.now()));
  const now = createWatchedClock(effects, (byMs) => {
    const atMs = effects.now();
    clockSettings.add(byMs, atMs);
    run(
      writePersistently(writer, 'instance.clockWasSet', { atMs, byMs }, effects),
      'that the clock was set could not be recorded',
    );
    if (byMs >= 0) return;
    logger.warn({ by_ms: -byMs }, 'the clock was set back: what waits for a retry is planned anew');
    walk(() => planAnew(-byMs));
  });
  const running = createSlots<Promise<void>>();
  let walks = 0;
  let lastWalk = Promise.resolve();
  /** Of these a commit said something since the last look. */
  let heardOf: WebhookId[] = [];
  let lookAtAllDue = true;
  let isFirstLook = true;
  let lookedAtAllMs = 0;
  let behindAtOnce = BEGUN_AT_ONCE_MAX;
  /** When the first reason to look came since the last look. */
  let wokenAtMs: number | undefined;

  writer.onCommit(hear);

  return { tick, settled };

  async function tick(): Promise<number | null> {
    try {
      return look(now());
    } catch (error) {
      // Whose turn it was is not known any more.
      lookAtAllDue = true;
      throw error;
    }
  }

  function look(nowMs: number): number | null {
    adaptPortion();
    const heard = heardOf;
    heardOf = [];
    for (const webhookId of heard) lanes.lookAt(webhookId, nowMs, nowMs);
    if (lookAtAllDue || effects.monotonicMs() - lookedAtAllMs > LOOK_AT_ALL_EVERY_MS) lookAtAll(nowMs);
    const turns = lanes.turns(nowMs, BEGUN_AT_ONCE_MAX, behindAtOnce);
    if (turns.length === 0) return lanes.nextLookAtMs(nowMs);
    claim(turns, nowMs);
    return nowMs;
  }

  async function settled(): Promise<void> {
    while (running.size > 0) await Promise.all(running);
  }

  function wake(): void {
    wokenAtMs ??= effects.monotonicMs();
    options.wake?.();
  }

  /** Additive increase, multiplicative decrease: a steady portion within some hundred looks, less within a few. */
  function adaptPortion(): void {
    const waitedMs = wokenAtMs === undefined ? 0 : effects.monotonicMs() - wokenAtMs;
    wokenAtMs = undefined;
    behindAtOnce =
      waitedMs > BETWEEN_LOOKS_MS
        ? Math.max(BEHIND_AT_ONCE_MIN, Math.floor(behindAtOnce / 2))
        : Math.min(BEGUN_AT_ONCE_MAX, behindAtOnce + 1);
  }

  function hear(changes: ReadonlySet<Change>): void {
    let concerned = false;
    for (const change of changes) {
      const webhookId = webhookOf(change);
      const enabledId = enabledWebhookOf(change);
      if (enabledId !== undefined) walk(() => hurry(enabledId));
      if (webhookId !== undefined) heardOf.push(webhookId);
      else if (change === 'outbox' || change === 'everything') lookAtAllDue = true;
      else continue;
      concerned = true;
    }
    if (concerned) wake();
  }

  function lookAtAll(nowMs: number): void {
    lookAtAllDue = false;
    lookedAtAllMs = effects.monotonicMs();
    const pending = reads.outbox.pendingWebhooks();
    lanes.replace(pending, nowMs);
    if (isFirstLook) hurryTheRest(pending, nowMs);
    isFirstLook = false;
    // While davit was down, the clock was set back, or the window was made shorter.
    const furthestAtMs = pending.at(-1)?.next_attempt_at ?? 0;
    if (furthestAtMs <= nowMs + schedule.windowMs || walks > 0) return;
    const window_ms = schedule.windowMs;
    logger.warn({ window_ms }, 'retries were planned beyond the window: they are planned anew');
    walk(() => planAnew(0));
  }

  /** One after the other: what one plans for earlier, another that is further on would not meet. */
  function walk(steps: () => Promise<void>): void {
    walks += 1;
    const ended = lastWalk.then(steps).finally(() => {
      walks -= 1;
    });
    lastWalk = run(ended, 'retries could not be planned anew');
  }

  /** Retries that were planned by the clock as it was come when they would have come, and none beyond the window. */
  async function planAnew(byMs: number): Promise<void> {
    const furthestMs = schedule.windowMs;
    await inSteps<PendingPlace>((after) =>
      writePersistently(writer, 'outbox.setBack', { byMs, furthestMs, after }, effects),
    );
  }

  /** Of those that were enabled just before davit ended. */
  function hurryTheRest(pending: readonly PendingWebhook[], nowMs: number): void {
    for (const { webhook_id: webhookId } of pending) {
      if (reads.outbox.isUnhurried(webhookId, nowMs)) walk(() => hurry(webhookId));
    }
  }

  /** What waited for a retry when the webhook was enabled is tried now. */
  async function hurry(webhookId: WebhookId): Promise<void> {
    await inSteps<PendingPlace>((after) =>
      writePersistently(writer, 'outbox.hurry', { webhookId, after }, effects),
    );
  }

  /** Begins what these may begin. */
  function claim(turns: readonly Turn[], nowMs: number): void {
    const requests = turns.map(({ lane, slots }) => ({
      webhookId: lane.webhookId,
      limit: slots,
      underWay: lane.underWay,
      ahead: lane.ahead,
    }));
    reads.outbox.claim(requests, nowMs).forEach((claim, index) => {
      const lane = turns[index]?.lane;
      if (lane !== undefined) take(lane, claim, nowMs);
    });
  }

  function take(lane: Lane, { due, secrets, nextAtMs }: Claim, nowMs: number): void {
    for (const delivery of due) run(deliver(lane, delivery, secrets), 'an attempt could not be recorded');
    lanes.looked(lane, nextAtMs, nowMs);
  }

  /** Resolves when it has ended, in whichever way. */
  function run(work: Promise<unknown>, problem: string): Promise<void> {
    const ended = work
      .catch((error: unknown) => logger.error({ err: error }, problem))
      .then(() => void running.take(place));
    const place = running.put(ended);
    return ended;
  }

  async function deliver(lane: Lane, delivery: DueDelivery, secrets: readonly string[]): Promise<void> {
    const atMs = now();
    const slot = lanes.begin(lane, delivery.seq, atMs);
    figures?.began(delivery, lane.failures > 0, atMs);
    const headers = signedHeaders({
      eventId: delivery.event_id,
      secrets,
      atSeconds: Math.floor(atMs / 1000),
      body: delivery.payload,
    });
    const { url, payload: body } = delivery;
    const outcome = await sender.send({ url, headers, body, reputation: reputationOf(lane) });
    const stopped = outcome.error === 'stopped';
    lanes.end(slot, stopped ? 'stopped' : outcome.ok ? 'succeeded' : 'failed', now());
    figures?.ended();
    wake();
    // Nothing is known of the receiver then: the attempt was none, and is made at the next start.
    if (stopped) return;

    const settlement = settlementOf(delivery, atMs, outcome);
    logAttempt(settlement, delivery);
    // What cannot be recorded for any other reason than a full disk is a bug. It then stays under way, so
    // that it is not sent over and over.
    const written = await writePersistently(writer, 'outbox.settle', settlement, effects);
    lanes.recorded(slot, now());
    const settled = typeof written === 'string' ? written : disabled(lane, written);
    figures?.settled(settlement, settled);
    // A look that came while it was under way has passed it over.
    if (settled === 'onNewerLadder') lanes.lookAt(lane.webhookId, now(), now());
    else if (settlement.next.kind === 'retry') lanes.lookAt(lane.webhookId, settlement.next.atMs, now());
    wake();
  }

  /** What arises for it from now on is held, and nobody else says so. */
  function disabled({ webhookId }: Lane, { delivery, disabledFor }: SettledLast): Settled {
    logger.warn({ webhook_id: webhookId, reason: disabledFor }, 'a webhook is disabled');
    figures?.disabled();
    return delivery;
  }

  /** What follows from an attempt, for the delivery and for its webhook. */
  function settlementOf(delivery: DueDelivery, atMs: number, outcome: SendOutcome): Settlement {
    const ladderAttempts = delivery.ladder_attempts + 1;
    // The ladder's 24 h begin with its first attempt, which as a rule is when the event happens: what was
    // held, or waited for davit or for a receiver that was down, has all its retries before it. Just before the
    // attempt, so that a redelivery asked for from then on is newer.
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
      next: outcome.ok
        ? { kind: 'delivered' }
        : nextAttempt({
            // What of it never passed, as a clock was set ahead, takes no retry away.
            ladderStartedAtMs: ladderStartedAtMs + clockSettings.since(ladderStartedAtMs),
            ladderAttempts,
            nowMs: now(),
            retryAfter: outcome.retryAfter,
            randomFraction: randomFraction(effects),
            schedule,
          }),
      ladderAttempts,
      ladderStartedAtMs,
      neverPassedMs: Math.max(0, clockSettings.since(atMs - DISABLE_AFTER_FAILING_MS)),
      disableReason: statusCode === 410 ? 'the receiver answered 410 Gone' : null,
    };
  }

  /** Successes at `debug`: a line costs as much as signing does. */
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
}

function reputationOf({ failures, hasSucceeded }: Lane): Reputation {
  if (failures >= FAILING_AFTER) return 'failing';
  return hasSucceeded ? 'proven' : 'unproven';
}

function randomFraction(effects: Effects): number {
  const [high = 0, low = 0] = effects.randomBytes(2);
  return (high * 256 + low) / 65_536;
}
