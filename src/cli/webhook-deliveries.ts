import type { Command } from 'commander';
import {
  DELIVERY_STATUSES,
  type Delivery,
  type DeliveryStatus,
  EVENT_TYPES,
  parseTimestamp,
} from '../domain.ts';
import { LONGEST_DURATION, parseDuration } from '../durations.ts';
import { appending, option } from '../options.ts';
import { ADMINISTRATOR } from '../store/administrator.ts';
import type { Store } from '../store/store.ts';
import { type CommandContext, explain, jsonOption, misused, requiredOption } from './command.ts';
import { withStore } from './database-file.ts';
import { chosenOf, latestOf, limitOption, noteCut } from './lists.ts';
import { moment } from './moments.ts';
import { nameOfWebhook, resolveWebhook, WEBHOOK_ARGUMENT } from './names.ts';
import { printJson, printTable } from './results.ts';
import { isServed } from './serving.ts';
import { shortEvents, shortSentence } from './shorten.ts';
import type { Colour } from './table.ts';
import { deliveriesText } from './webhook-text.ts';

interface ListOptions {
  status?: string[];
  eventType?: string[];
  limit: number;
  json?: boolean;
}

/** `davit admin webhook deliveries`. */
export function defineDeliveries(command: Command, context: CommandContext): void {
  explain(
    command.summary('its latest deliveries, and their status'),
    'Lists deliveries of a webhook, newest first.',
    [
      'davit admin webhook deliveries whk_…',
      'davit admin webhook deliveries whk_… --status exhausted --limit 100',
    ],
  )
    .argument(...WEBHOOK_ARGUMENT)
    // Not <status...>, which would take the webhook for another one when that comes after it.
    .addOption(
      option('--status <status>', `only these, may be repeated: ${DELIVERY_STATUSES.join(', ')}`)
        .choices(DELIVERY_STATUSES)
        .argParser(appending(String)),
    )
    .addOption(
      option('--event-type <type>', 'only those of this event type; may be repeated')
        .choices(EVENT_TYPES)
        .argParser(appending(String)),
    )
    .addOption(limitOption())
    .addOption(jsonOption())
    .action((idOrUrl: string, options: ListOptions) => listDeliveries(command, idOrUrl, options, context));
}

async function listDeliveries(
  command: Command,
  idOrUrl: string,
  { status, eventType, limit, json }: ListOptions,
  context: CommandContext,
): Promise<void> {
  const statuses = status === undefined ? null : chosenOf(command, 'status', status, DELIVERY_STATUSES);
  const eventTypes = eventType === undefined ? null : chosenOf(command, 'event type', eventType, EVENT_TYPES);
  await withStore(command, context, 'refuse', async (store) => {
    const webhook = resolveWebhook(store, idOrUrl, context.effects.now());
    const filter = { statuses, eventTypes, createdAfterMs: null, createdBeforeMs: null };
    const { items, isAll } = await latestOf(limit, (beforeSeq, pageLimit) =>
      store.reads.deliveries.page(ADMINISTRATOR, webhook, filter, beforeSeq, pageLimit),
    );
    if (json === true) printJson(context, items);
    else printDeliveries(items, store, context);
    if (!isAll) noteCut(command, items.length, context);
  });
}

function printDeliveries(items: readonly Delivery[], store: Store, context: CommandContext): void {
  printTable(context, items, 'there are no such deliveries', [
    { title: 'ID', of: ({ id }) => id },
    { title: 'EVENT', of: ({ event_type }) => event_type, shorten: shortEvents },
    { title: 'STATUS', of: ({ status }) => status, colour: ({ status }) => STATUS_COLOURS[status] },
    { title: 'ATTEMPTS', of: ({ attempt_count }) => String(attempt_count) },
    { title: 'LAST', of: ({ id }) => store.reads.deliveries.lastResult(id) ?? '', shorten: shortSentence },
    { title: 'NEXT', of: ({ next_attempt_at }) => moment(context, next_attempt_at) },
    { title: 'CREATED', of: ({ created_at }) => moment(context, created_at) },
  ]);
}

const STATUS_COLOURS: Record<DeliveryStatus, Colour> = {
  pending: 'yellow',
  delivered: 'green',
  exhausted: 'red',
  held: 'gray',
};

interface ReplayOptions {
  since: string;
  until?: string;
  status?: string;
  json?: boolean;
}

/** `davit admin webhook replay`. */
export function defineReplay(command: Command, context: CommandContext): void {
  explain(
    command.summary('send past deliveries again'),
    'Sends the deliveries of a period again, each with all its attempts. Receivers recognise repeats by the event id. A ' +
      'moment is given as 2026-01-31T12:00:00Z, or as a duration such as 24h, for 24 hours ago.',
    [
      'davit admin webhook replay whk_… --since 24h --status exhausted',
      'davit admin webhook replay whk_… --since 2026-01-31T12:00:00Z',
    ],
  )
    .argument(...WEBHOOK_ARGUMENT)
    .addOption(requiredOption('--since <moment>', 'deliveries that were created then or later'))
    .addOption(
      option('--until <moment>', 'deliveries that were created then or earlier; by default until now'),
    )
    .addOption(
      option('--status <status>', `only those that have this status now: ${DELIVERY_STATUSES.join(', ')}`)
        .choices(DELIVERY_STATUSES)
        .argParser(String),
    )
    .addOption(jsonOption())
    .action((idOrUrl: string, options: ReplayOptions) => replay(command, idOrUrl, options, context));
}

async function replay(
  command: Command,
  idOrUrl: string,
  options: ReplayOptions,
  context: CommandContext,
): Promise<void> {
  const nowMs = context.effects.now();
  const sinceMs = momentOf(command, '--since', options.since, nowMs, Math.ceil);
  const untilMs =
    options.until === undefined ? nowMs : momentOf(command, '--until', options.until, nowMs, Math.floor);
  if (sinceMs > nowMs) misused(command, '--since is in the future');
  if (untilMs < sinceMs) {
    const rounded = 'once --since is rounded up to a millisecond and --until down';
    misused(command, `--until must not be before --since, ${rounded}`);
  }
  const [status = null] =
    options.status === undefined ? [] : chosenOf(command, 'status', [options.status], DELIVERY_STATUSES);
  await withStore(command, context, 'refuse', async (store) => {
    const webhook = resolveWebhook(store, idOrUrl, nowMs);
    // Later deliveries are sent anyway.
    const asked = { sinceMs, untilMs: Math.min(untilMs, nowMs), status };
    const planned = await store.reads.replays.plan(webhook, asked);
    const result = await store.writer.write('replays.create', planned);
    if (options.json === true) return printJson(context, result);
    context.terminal.print(`${deliveriesText(result.count)} to ${nameOfWebhook(webhook)} will be sent again`);
    if (result.count === 0) return;
    if (webhook.status === 'disabled') {
      context.terminal.note('note: the webhook is disabled: they are sent when it is enabled');
    } else if (!(await isServed(command))) {
      context.terminal.note("note: no service is running: 'davit serve' sends them");
    }
  });
}

/** A moment, or a duration before `nowMs`, in milliseconds since 1970. `round` rounds the fraction of one. */
function momentOf(
  command: Command,
  name: string,
  text: string,
  nowMs: number,
  round: (partMs: number) => number,
): number {
  const agoMs = parseDuration(text);
  if (agoMs !== undefined) return nowMs - agoMs;
  return (
    parseTimestamp(text, round) ??
    misused(
      command,
      `${name} must be a moment such as 2026-01-31T12:00:00Z, or a duration such as 24h, at most ${LONGEST_DURATION}`,
    )
  );
}
