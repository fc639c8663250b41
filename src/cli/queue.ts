import type { Command } from 'commander';
import type { DeploymentId } from '../domain.ts';
import type {
  Backlog,
  Excerpt,
  ReplayBacklog,
  ReportedDeployment,
  WaitingDeployment,
  WebhookBacklog,
} from '../store/backlog.ts';
import type { Serving } from '../store/holder.ts';
import type { Reads } from '../store/store.ts';
import { type CommandContext, explain, jsonOption } from './command.ts';
import { dbPathOf, withStore } from './database-file.ts';
import { STATUS_COLOURS } from './deployment-status.ts';
import { limitOption } from './lists.ts';
import { moment } from './moments.ts';
import { printJson } from './results.ts';
import { isLeft, serviceOf, serviceText, visibleProcess, waitsForResume } from './serving.ts';
import { shortName, shortRef, shortSentence, shortUrl } from './shorten.ts';
import { type Column, fields, table } from './table.ts';
import { FAILURE_COLUMNS, nextAttemptText } from './webhook-text.ts';

/**
 * Why a deployment has not started: no service runs; its project is paused; another one of its project runs, or is
 * before it; one holds up all others; `--max-concurrent` is reached, or will be by those before it; or none of these,
 * and the service starts it as soon as the database takes writes.
 */
type WaitsFor = 'service' | 'project_resumed' | 'project_runs' | 'turn' | Hold | 'place' | 'nothing';

/**
 * Why a running deployment holds up all others: an earlier run of the service left it, and it has not ended; or its
 * command cannot start yet, on a full disk for instance.
 */
type Hold = 'earlier_run' | 'earlier_start';

/** `project_resumed`: it waits to start, and until then holds up none. */
type RunningState = Hold | 'project_resumed';

/** The process of a command is recorded sooner after the claim, unless the database takes no writes. */
const START_MAX_MS = 5_000;

/** `davit admin queue`. */
export function defineQueue(command: Command, context: CommandContext): void {
  explain(
    command,
    'Shows what runs, waits and is retried, since when and why, in one snapshot: deployments in the order in which they ' +
      'start, and webhooks with deliveries that are not sent yet.',
    ['davit admin queue', 'davit admin queue --limit 200', 'davit admin queue --json'],
  )
    .addOption(limitOption())
    .addOption(jsonOption())
    .action(async ({ limit, json }: { limit: number; json?: boolean }) => {
      const nowMs = context.effects.now();
      const { service, backlog, states } = await withStore(command, context, 'refuse', async (store) => {
        const service = await serviceOf(command);
        const serviceProcessId = service && (await visibleProcess(service, dbPathOf(command)));
        return {
          service,
          backlog: store.reads.backlog.all(nowMs, limit),
          states: statesOf(store.reads, service, serviceProcessId, nowMs),
        };
      });
      const queue = { service, ...backlog, waiting: withReasons(backlog, service, states) };
      if (json === true) printJson(context, queue);
      else printQueue(queue, states, context);
    });
}

interface Queue extends Backlog {
  service: Serving | null;
  waiting: Excerpt<ExplainedDeployment>;
}

interface ExplainedDeployment extends WaitingDeployment {
  waits_for: WaitsFor;
}

type States = ReadonlyMap<DeploymentId, RunningState>;

function statesOf(
  reads: Reads,
  service: Serving | null,
  serviceProcessId: number | null,
  nowMs: number,
): States {
  const states = new Map<DeploymentId, RunningState>();
  if (service === null) return states;
  for (const deployment of reads.deployments.running()) {
    const { id, process, started_at } = deployment;
    if (isLeft(deployment, service, serviceProcessId, nowMs)) states.set(id, 'earlier_run');
    else if (waitsForResume(reads, deployment)) states.set(id, 'project_resumed');
    else if (process === null && nowMs - Date.parse(started_at) > START_MAX_MS)
      states.set(id, 'earlier_start');
  }
  return states;
}

function withReasons(
  { waiting, running }: Backlog,
  service: Serving | null,
  states: States,
): Excerpt<ExplainedDeployment> {
  const hold = [...states.values()].find((state) => state !== 'project_resumed');
  const limit = service?.max_concurrent ?? null;
  const taken = slotsTaken(running.count, states);
  // A service that does not tell its limit may have reached it as soon as it runs one.
  let freeSlots = limit === null ? (taken > 0 ? 0 : Number.POSITIVE_INFINITY) : limit - taken;
  return {
    count: waiting.count,
    items: waiting.items.map((deployment) => {
      const reason = waitsFor(deployment, service, hold, freeSlots);
      if (reason === 'nothing') freeSlots -= 1;
      return { ...deployment, waits_for: reason };
    }),
  };
}

function slotsTaken(runningCount: number, states: States): number {
  return runningCount - [...states.values()].filter((state) => state === 'project_resumed').length;
}

function waitsFor(
  { project_status, project_runs, queue_position }: WaitingDeployment,
  service: Serving | null,
  hold: Hold | undefined,
  freeSlots: number,
): WaitsFor {
  if (project_status === 'paused') return 'project_resumed';
  if (service === null) return 'service';
  if (project_runs !== null) return 'project_runs';
  if (queue_position !== 1) return 'turn';
  if (hold !== undefined) return hold;
  return freeSlots > 0 ? 'nothing' : 'place';
}

function printQueue(queue: Queue, states: States, context: CommandContext): void {
  const { service, running, waiting, reported, webhooks, replays } = queue;
  const slots = runningText(slotsTaken(running.count, states), service);
  context.terminal.print(summary(queue, slots, context));
  printExcerpt(context, running, [
    { title: 'RUNNING', of: ({ id }) => id },
    ...PROJECT_AND_REF,
    {
      title: 'STATUS',
      of: ({ id, status }) => `${status}${stateText(states.get(id))}`,
      colour: ({ status }) => STATUS_COLOURS[status],
    },
    { title: 'SINCE', of: ({ started_at, created_at }) => moment(context, started_at ?? created_at) },
  ]);
  if (service === null && running.count > 0) {
    const isCanceling = running.items.some(({ status }) => status === 'canceling');
    const result = isCanceling ? 'interrupted, or as canceled if they are canceling' : 'interrupted';
    context.terminal.print(`no service is running: 'davit serve' ends these and records them as ${result}`);
  }
  printExcerpt(context, waiting, [
    { title: 'WAITING', of: ({ id }) => id },
    ...PROJECT_AND_REF,
    { title: 'NUMBER', of: ({ queue_position }) => String(queue_position ?? '') },
    { title: 'SINCE', of: ({ created_at }) => moment(context, created_at) },
    { title: 'WAITS FOR', of: ({ waits_for }) => reasonText(waits_for, slots), shorten: shortSentence },
  ]);
  printReported(reported, context);
  printWebhooks(webhooks, service, context);
  printReplays(replays, context);
}

const PROJECT_AND_REF: readonly Column<{ project_name: string; ref: string }>[] = [
  { title: 'PROJECT', of: ({ project_name }) => project_name, shorten: shortName },
  { title: 'REF', of: ({ ref }) => ref, shorten: shortRef },
];

function summary(
  { service, waiting, reported, deliveries, replays }: Queue,
  slots: string,
  context: CommandContext,
) {
  const { pending_count, due_count, held_count } = deliveries;
  const unserved = "none: nothing is started or sent until 'davit serve' runs";
  return fields(context.terminal, [
    ['service', service === null ? unserved : serviceText(service, context)],
    ['running', slots],
    ['waiting', String(waiting.count)],
    ['elsewhere', reported.count === 0 ? null : `${reported.count}, carried out by other systems`],
    ['deliveries', `${pending_count} pending, ${due_count} of them due; ${held_count} held`],
    ['replays', replays.count === 0 ? null : `${replays.count} not finished`],
  ]);
}

function runningText(count: number, service: Serving | null): string {
  const limit = service?.max_concurrent ?? null;
  return limit === null ? String(count) : `${count} of at most ${limit}`;
}

function stateText(state: RunningState | undefined): string {
  switch (state) {
    case undefined:
      return '';
    case 'earlier_run':
      return ': left by an earlier run';
    case 'earlier_start':
      return ': cannot start yet';
    case 'project_resumed':
      return ': its project is paused';
    default:
      return state satisfies never;
  }
}

function reasonText(waitsFor: WaitsFor, slots: string): string {
  switch (waitsFor) {
    case 'service':
      return "'davit serve'";
    case 'project_resumed':
      return 'its project, which is paused';
    case 'project_runs':
      return 'the running one of its project';
    case 'turn':
      return 'earlier ones of its project';
    case 'earlier_run':
      return 'one of an earlier run, which has not ended';
    case 'earlier_start':
      return 'an earlier one, which cannot start yet';
    case 'place':
      return `a free slot: ${slots} running`;
    case 'nothing':
      return 'nothing: it is starting';
    default:
      return waitsFor satisfies never;
  }
}

function printReported(reported: Excerpt<ReportedDeployment>, context: CommandContext): void {
  printExcerpt(context, reported, [
    { title: 'ELSEWHERE', of: ({ id }) => id },
    ...PROJECT_AND_REF,
    { title: 'STATUS', of: ({ status }) => status, colour: ({ status }) => STATUS_COLOURS[status] },
    { title: 'SINCE', of: ({ started_at, created_at }) => moment(context, started_at ?? created_at) },
    { title: 'FAILS UNREPORTED', of: ({ report_due_at }) => moment(context, report_due_at) || 'never' },
  ]);
}

function printWebhooks(
  webhooks: Excerpt<WebhookBacklog>,
  service: Serving | null,
  context: CommandContext,
): void {
  printExcerpt(context, webhooks, [
    { title: 'WEBHOOK', of: ({ id }) => id },
    { title: 'URL', of: ({ url }) => url, shorten: shortUrl },
    { title: 'WAITING', of: ({ pending_count, held_count }) => String(pending_count + held_count) },
    { title: 'NEXT ATTEMPT', of: (webhook) => nextAttemptText(webhook, service !== null, context) },
    ...FAILURE_COLUMNS,
  ]);
}

function printReplays(replays: Excerpt<ReplayBacklog>, context: CommandContext): void {
  printExcerpt(context, replays, [
    { title: 'REPLAY TO', of: ({ webhook_id }) => webhook_id },
    { title: 'OF EVENTS FROM', of: ({ since }) => moment(context, since) },
    { title: 'UNTIL', of: ({ until }) => moment(context, until) },
    { title: 'ASKED FOR', of: ({ created_at }) => moment(context, created_at) },
  ]);
}

/** Prints a table of the items, and how many more there are; nothing if there are none. */
function printExcerpt<Item>(
  { terminal }: CommandContext,
  { count, items }: Excerpt<Item>,
  columns: readonly Column<NoInfer<Item>>[],
): void {
  if (count === 0) return;
  terminal.print('');
  terminal.print(table(terminal, items, columns));
  if (count > items.length) terminal.print(`and ${count - items.length} more`);
}
