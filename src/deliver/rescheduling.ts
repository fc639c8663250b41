import type { ClockSetting } from '../clock.ts';
import type { WebhookId } from '../domain.ts';
import { MINUTE_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import type { PendingWebhook } from '../store/outbox.ts';
import type { PendingPosition } from '../store/settlements.ts';
import { inSteps } from '../store/steps.ts';
import type { Reads } from '../store/store.ts';
import { type Writer, writePersistently } from '../store/writer.ts';
import type { RetrySchedule } from './retry.ts';

interface ReschedulingOptions {
  reads: Pick<Reads, 'outbox'>;
  writer: Writer;
  schedule: RetrySchedule;
  effects: Effects;
  logger: Logger;
  /** Is given each walk and each record. Logs why it failed, and resolves when it has ended, also if it failed. */
  track(work: Promise<void>, problem: string): Promise<void>;
}

/** Changes when pending deliveries are tried again, in walks through many rows that run in the background. */
interface Rescheduling {
  /**
   * Records that the clock was set and, if back, reschedules retries. That comes first, so that the next start finds out
   * that it was set back if davit ends before. What the history of the clock tells depends on the order of the records.
   */
  followClock(setting: ClockSetting): void;
  /** Makes due now what was waiting for a retry when the webhook was enabled. */
  retryNow(webhookId: WebhookId): void;
  /** Does what is still to be done for `pending`, all webhooks with pending deliveries. */
  catchUp(pending: readonly PendingWebhook[], nowMs: number): void;
}

/**
 * How far beyond the window a retry may lie without being rescheduled: steps of the clock below a second are not
 * noticed, and one that sends last attempts a window early exhausts their deliveries.
 */
const BEYOND_TOLERANCE_MS = MINUTE_MS;

/** Walks through retries run one after the other: one that is further on would miss what another moves to earlier. */
export function createRescheduling(options: ReschedulingOptions): Rescheduling {
  const { reads, writer, schedule, effects, logger, track } = options;
  const furthestMs = schedule.windowMs + BEYOND_TOLERANCE_MS;
  let queuedWalks = 0;
  let lastWalk = Promise.resolve();
  let lastRecord = Promise.resolve();
  let isFirstTime = true;

  return { followClock, retryNow: (webhookId) => queueWalk(() => retryNow(webhookId)), catchUp };

  function followClock(setting: ClockSetting): void {
    const earlierOnes = lastRecord;
    const record = async () => {
      await earlierOnes;
      await writePersistently(writer, 'instance.clockWasSet', setting, effects);
    };
    const { byMs } = setting;
    if (byMs >= 0) {
      lastRecord = track(record(), 'a change of the clock could not be recorded');
      return;
    }
    logger.warn({ by_ms: -byMs }, 'the clock was set back: pending retries are rescheduled');
    queueWalk(async () => {
      await reschedule(-byMs);
      await record();
    });
    lastRecord = lastWalk;
  }

  function catchUp(pending: readonly PendingWebhook[], nowMs: number): void {
    if (isFirstTime) resumeRetryNow(pending, nowMs);
    isFirstTime = false;
    // Retries can lie beyond the window if, while davit was down, the clock was set back or the window was shortened.
    const isBeyond = pending.some(({ last_attempt_at }) => last_attempt_at > nowMs + furthestMs);
    if (!isBeyond || queuedWalks > 0) return;
    const window_ms = schedule.windowMs;
    logger.warn({ window_ms }, 'retries were scheduled beyond the window: they are rescheduled');
    queueWalk(() => reschedule(0));
  }

  /** Completes `retryNow` for webhooks that were enabled just before davit ended. */
  function resumeRetryNow(pending: readonly PendingWebhook[], nowMs: number): void {
    for (const { webhook_id: webhookId } of pending) {
      if (reads.outbox.isRetryNowUnfinished(webhookId, nowMs)) queueWalk(() => retryNow(webhookId));
    }
  }

  function queueWalk(steps: () => Promise<void>): void {
    queuedWalks += 1;
    const ended = lastWalk.then(steps).finally(() => {
      queuedWalks -= 1;
    });
    lastWalk = track(ended, 'retries could not be rescheduled, or a change of the clock not recorded');
  }

  /** After the clock was set back by `byMs`: moves retries back as much, and makes those beyond the window due. */
  async function reschedule(byMs: number): Promise<void> {
    await inSteps<PendingPosition>((after) =>
      writePersistently(writer, 'outbox.setBack', { byMs, furthestMs, after }, effects),
    );
  }

  async function retryNow(webhookId: WebhookId): Promise<void> {
    await inSteps<PendingPosition>((after) =>
      writePersistently(writer, 'outbox.retryNow', { webhookId, after }, effects),
    );
  }
}
