import type { Command } from 'commander';
import type { WebhookId, WebhookStatus } from '../domain.ts';
import { option } from '../options.ts';
import type { WebhookBacklog } from '../store/backlog.ts';
import type { PendingPosition } from '../store/settlements.ts';
import { inSteps } from '../store/steps.ts';
import type { Store } from '../store/store.ts';
import { DISABLED_BY } from '../store/webhooks.ts';
import { type CommandContext, explain, jsonOption } from './command.ts';
import { type ConfirmedOptions, confirm } from './confirm.ts';
import { withStore } from './database-file.ts';
import { exactMomentOf, moment } from './moments.ts';
import { nameOfWebhook, resolveWebhook, WEBHOOK_ARGUMENT } from './names.ts';
import { printJson, printTable } from './results.ts';
import { isServed } from './serving.ts';
import { shortEvents, shortName, shortUrl } from './shorten.ts';
import { type Colour, fields } from './table.ts';
import { defineDeliveries, defineReplay } from './webhook-deliveries.ts';
import { definePing } from './webhook-ping.ts';
import { deliveriesText, FAILURE_COLUMNS, keyExpiredAt, nextAttemptText } from './webhook-text.ts';

/** `davit admin webhook`. */
export function defineWebhooks(command: Command, context: CommandContext): void {
  explain(
    command,
    'The webhooks that keys have registered over the API, of all keys. The service sends the deliveries while it runs.',
    [
      'davit admin webhook list',
      'davit admin webhook ping whk_…',
      'davit admin webhook replay whk_… --since 24h',
    ],
  );
  defineList(command.command('list'), context);
  defineShow(command.command('show'), context);
  defineStatus(command.command('enable'), context, {
    status: 'enabled',
    summary: 'send deliveries to it again, held ones too',
    text:
      'Sends deliveries to a webhook again. Those that were held while it was disabled, and those that waited for a retry, ' +
      'are sent now; each has all its attempts again.',
  });
  defineStatus(command.command('disable'), context, {
    status: 'disabled',
    summary: 'hold its deliveries back',
    text: 'Stops sending to a webhook. Its deliveries are held, and are sent when it is enabled again.',
  });
  defineDelete(command.command('delete'), context);
  definePing(command.command('ping'), context);
  defineDeliveries(command.command('deliveries'), context);
  defineReplay(command.command('replay'), context);
}

function defineList(command: Command, context: CommandContext): void {
  explain(command.summary('all webhooks, of all keys'), 'Lists all webhooks, oldest first.', [
    'davit admin webhook list',
    'davit admin webhook list --json',
  ])
    .addOption(jsonOption())
    .action((options: { json?: boolean }) =>
      withStore(command, context, 'refuse', (store) => {
        const webhooks = store.reads.backlog.webhooks(context.effects.now());
        if (options.json === true) printJson(context, webhooks);
        else printWebhooks(webhooks, context);
      }),
    );
}

function printWebhooks(webhooks: readonly WebhookBacklog[], context: CommandContext): void {
  printTable(context, webhooks, 'there are no webhooks: keys register them with POST /v2/webhooks', [
    { title: 'ID', of: ({ id }) => id },
    { title: 'URL', of: ({ url }) => url, shorten: shortUrl },
    {
      title: 'STATUS',
      of: (webhook) => (isOnlyRetried(webhook, context) ? 'key expired' : webhook.status),
      colour: (webhook) => (isOnlyRetried(webhook, context) ? 'red' : STATUS_COLOURS[webhook.status]),
    },
    {
      title: 'WAITING',
      of: (webhook) => (waitingCount(webhook) === 0 ? '' : String(waitingCount(webhook))),
    },
    { title: 'LAST SUCCESS', of: ({ last_success_at }) => moment(context, last_success_at) },
    { title: 'LAST FAILURE', of: ({ last_failure_at }) => moment(context, last_failure_at) },
    ...FAILURE_COLUMNS,
    { title: 'KEY', of: ({ created_by }) => created_by.name, shorten: shortName },
    { title: 'EVENTS', of: ({ events }) => events.join(' '), shorten: shortEvents },
  ]);
}

const STATUS_COLOURS: Record<WebhookStatus, Colour> = { enabled: 'green', disabled: 'red' };

/** Whether it is enabled, but gets no new events. */
function isOnlyRetried(webhook: WebhookBacklog, { effects }: CommandContext): boolean {
  return webhook.status === 'enabled' && keyExpiredAt(webhook, effects.now()) !== null;
}

function waitingCount({ pending_count, held_count }: WebhookBacklog): number {
  return pending_count + held_count;
}

function defineShow(command: Command, context: CommandContext): void {
  explain(
    command.summary('one webhook'),
    'Shows a webhook and the state of its deliveries; never its secrets.',
    ['davit admin webhook show whk_…'],
  )
    .argument(...WEBHOOK_ARGUMENT)
    .addOption(jsonOption())
    .action((text: string, options: { json?: boolean }) =>
      withStore(command, context, 'refuse', async (store) => {
        const webhook = resolveWebhook(store, text, context.effects.now());
        if (options.json === true) return printJson(context, webhook);
        context.terminal.print(webhookText(webhook, await isServed(command), context));
      }),
    );
}

function webhookText(webhook: WebhookBacklog, served: boolean, context: CommandContext): string {
  const at = exactMomentOf(context);
  const expiredAt = at(keyExpiredAt(webhook, context.effects.now()));
  const { status, status_reason, created_by, pending_count, due_count, held_count, last_error } = webhook;
  return fields(context.terminal, [
    ['id', webhook.id],
    ['url', webhook.url],
    ['description', webhook.description],
    ['events', webhook.events.join(' ')],
    ['status', status_reason === null ? status : `${status}: ${status_reason}`],
    ['created', at(webhook.created_at)],
    ['created by', `key ${created_by.name} (${created_by.key_id})`],
    ['new events', expiredAt === null ? null : `none: its key expired at ${expiredAt}`],
    ['last success', at(webhook.last_success_at) ?? 'never'],
    ['last failure', at(webhook.last_failure_at) ?? 'never'],
    ['failing since', at(webhook.failing_since)],
    ['failures in a row', String(webhook.consecutive_failures)],
    ['pending', held_count > 0 ? null : `${pending_count}, ${due_count} of them due`],
    ['held', held_count > 0 ? String(held_count) : null],
    ['next attempt', held_count > 0 ? null : nextAttemptText(webhook, served, context) || null],
    ['last error', last_error],
  ]);
}

function defineStatus(
  command: Command,
  context: CommandContext,
  { status, summary, text }: { status: WebhookStatus; summary: string; text: string },
): void {
  explain(command.summary(summary), text, [`davit admin webhook ${command.name()} whk_…`])
    .argument(...WEBHOOK_ARGUMENT)
    .addOption(jsonOption())
    .action((idOrUrl: string, options: { json?: boolean }) =>
      withStore(command, context, 'refuse', async (store) => {
        const { before, after } = await setStatus(store, idOrUrl, status, context);
        if (options.json === true) return printJson(context, after);
        const already = before.status === status ? 'already ' : '';
        context.terminal.print(`${nameOfWebhook(after)} is ${already}${status}${consequence(before, after)}`);
        const expiredAt = keyExpiredAt(after, context.effects.now());
        if (status === 'enabled' && expiredAt !== null) {
          context.terminal.note(
            `note: it gets no new events, as its key expired at ${expiredAt}: register it again with another key`,
          );
        }
        if (before.held_count > 0 && status === 'enabled' && !(await isServed(command))) {
          const what = before.held_count === 1 ? 'it' : 'them';
          context.terminal.note(`note: no service is running: 'davit serve' sends ${what}`);
        }
      }),
    );
}

async function setStatus(
  store: Store,
  idOrUrl: string,
  status: WebhookStatus,
  { effects }: CommandContext,
): Promise<{ before: WebhookBacklog; after: WebhookBacklog }> {
  const before = resolveWebhook(store, idOrUrl, effects.now());
  await store.writer.write('webhooks.update', { id: before.id, status, disableReason: DISABLED_BY.admin });
  // Also if it was enabled already: the process that enabled it may have ended before it had done this.
  if (status === 'enabled') await retryNow(store, before.id);
  return { before, after: resolveWebhook(store, before.id, effects.now()) };
}

/**
 * Makes due now what waited for a retry when the webhook was enabled. For the API the service does so, but it is not told
 * of this change, if it runs.
 */
async function retryNow({ writer }: Store, webhookId: WebhookId): Promise<void> {
  await inSteps<PendingPosition>((after) => writer.write('outbox.retryNow', { webhookId, after }));
}

function consequence(before: WebhookBacklog, after: WebhookBacklog): string {
  if (before.status === after.status) return '';
  if (before.held_count > 0) return `; ${deliveriesText(before.held_count)} held for it will be sent now`;
  return after.held_count > 0 ? `; ${deliveriesText(after.held_count)} will be held until it is enabled` : '';
}

function defineDelete(command: Command, context: CommandContext): void {
  explain(
    command.summary('delete a webhook and its deliveries'),
    'Deletes a webhook, also for the key that registered it. Deliveries that wait are never sent. This cannot be undone.',
    ['davit admin webhook delete whk_…', 'davit admin webhook delete whk_… --yes'],
  )
    .argument(...WEBHOOK_ARGUMENT)
    .addOption(option('--yes', 'do not ask for confirmation'))
    .addOption(jsonOption())
    .action((idOrUrl: string, options: ConfirmedOptions) =>
      deleteWebhook(command, idOrUrl, options, context),
    );
}

async function deleteWebhook(
  command: Command,
  idOrUrl: string,
  options: ConfirmedOptions,
  context: CommandContext,
): Promise<void> {
  const webhook = await withStore(command, context, 'refuse', (store) =>
    resolveWebhook(store, idOrUrl, context.effects.now()),
  );
  const count = waitingCount(webhook);
  const lost = count === 0 ? '' : `${deliveriesText(count)} will never be sent. `;
  await confirm(
    command,
    `${lost}This cannot be undone.\nDelete ${nameOfWebhook(webhook)}?`,
    options.yes,
    context,
  );
  await withStore(command, context, 'refuse', (store) =>
    store.writer.write('webhooks.remove', { id: webhook.id }),
  );
  if (options.json === true) return printJson(context, webhook);
  context.terminal.print(`${nameOfWebhook(webhook)} is deleted`);
}
