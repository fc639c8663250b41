import { someSettings } from '../../src/config.ts';
import type { RetrySchedule } from '../../src/deliver/retry.ts';

/** What `davit serve` retries by unless it is told otherwise. */
export const DEFAULT_SCHEDULE: RetrySchedule = defaultSchedule();

function defaultSchedule(): RetrySchedule {
  const { options, valuesFrom } = someSettings('webhookRetryDelaysMs', 'webhookRetryWindowMs');
  const values = options().map((option) => [option.attributeName(), option.defaultValue]);
  const { webhookRetryDelaysMs: delaysMs, webhookRetryWindowMs: windowMs } = valuesFrom(
    Object.fromEntries(values),
  );
  return { delaysMs, windowMs };
}
