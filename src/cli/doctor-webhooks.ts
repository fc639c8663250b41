import { formatDuration, HOUR_MS } from '../durations.ts';
import type { WebhookBacklog } from '../store/backlog.ts';
import type { Reads } from '../store/store.ts';
import { DISABLED_BY } from '../store/webhooks.ts';
import { ageMs, type Case, OVERDUE_MS } from './doctor-case.ts';
import { type Finding, note, orOk, problem } from './findings.ts';
import { nameOfKey } from './names.ts';
import { deliveriesText, keyExpiredAt } from './webhook-text.ts';

const FAILING_FOR_MS = HOUR_MS;

/** Checks who is disabled, fails, is late or gets nothing. */
export function checkWebhooks(file: Case, reads: Reads): Finding[] {
  const webhooks = reads.backlog.webhooks(file.nowMs);
  const findings = webhooks.flatMap((webhook) =>
    webhook.status === 'disabled'
      ? findingOfDisabled(webhook, reads)
      : [findingOfExpired(webhook, file) ?? [], findingOfEnabled(webhook, file) ?? []].flat(),
  );
  const failing = webhooks.filter(
    (webhook) =>
      webhook.status === 'enabled' && webhook.failing_since !== null && !failsForLong(webhook, file),
  );
  if (failing.length > 0) {
    findings.push(
      note(
        'webhooks',
        `${failing.length} of ${webhooks.length} failing, for less than ${formatDuration(FAILING_FOR_MS)}`,
        'davit admin webhook list',
      ),
    );
  }
  return orOk(findings, 'webhooks', `${webhooks.length} of them, none failing`);
}

function findingOfDisabled(
  { id, status_reason, held_count, created_by }: WebhookBacklog,
  reads: Reads,
): Finding {
  const message = `${id} is disabled${status_reason === null ? '' : ` (${status_reason})`}`;
  if (held_count === 0) return note('webhooks', message, null);
  const held = `${message}, with ${deliveriesText(held_count)} held for it`;
  const enableOrDelete = `davit admin webhook enable ${id}; or davit admin webhook delete ${id}`;
  if (reads.keys.get(created_by.key_id)?.revoked_at !== null) {
    const advice = `davit admin webhook delete ${id}: its key is revoked, so it stays disabled`;
    return problem('webhooks', held, advice);
  }
  return Object.values<string | null>(DISABLED_BY).includes(status_reason)
    ? note('webhooks', held, enableOrDelete)
    : problem('webhooks', held, `fix the receiver, then ${enableOrDelete}`);
}

function findingOfExpired(webhook: WebhookBacklog, { nowMs }: Case): Finding | undefined {
  const expiredAt = keyExpiredAt(webhook, nowMs);
  if (expiredAt === null) return undefined;
  const { id, created_by } = webhook;
  const key = nameOfKey({ id: created_by.key_id, name: created_by.name });
  return problem(
    'webhooks',
    `${id} gets no new events: its ${key} expired at ${expiredAt}`,
    `register it again with another key, then davit admin webhook delete ${id}`,
  );
}

function findingOfEnabled(webhook: WebhookBacklog, file: Case): Finding | undefined {
  const { id, failing_since, consecutive_failures, last_error, due_count, next_attempt_at } = webhook;
  if (failsForLong(webhook, file)) {
    const how = last_error === null ? '' : `, last with ${last_error}`;
    return problem(
      'webhooks',
      `${id} has been failing since ${failing_since}, ${consecutive_failures} times in a row${how}`,
      `davit admin webhook ping ${id}; davit admin webhook deliveries ${id}`,
    );
  }
  if (!isOverdue(webhook, file)) return undefined;
  return problem(
    'webhooks',
    `${id} is behind with ${deliveriesText(due_count)}, the first due since ${next_attempt_at}`,
    file.service === null
      ? 'davit serve'
      : 'its receiver is too slow for its events, or davit serve needs a restart',
  );
}

/** Also if its deliveries are late because it fails: few attempts are made then, however many wait. */
function failsForLong(webhook: WebhookBacklog, file: Case): boolean {
  const { failing_since } = webhook;
  if (failing_since === null) return false;
  return (
    ageMs(failing_since, file.nowMs) > FAILING_FOR_MS || (file.service !== null && isOverdue(webhook, file))
  );
}

function isOverdue({ next_attempt_at }: WebhookBacklog, { nowMs }: Case): boolean {
  return ageMs(next_attempt_at, nowMs) > OVERDUE_MS;
}
