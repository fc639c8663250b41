import type { Plugin } from '@hapi/hapi';
import Joi from 'joi';
import {
  DELIVERY_STATUSES,
  type Delivery,
  type DeliveryStatus,
  EVENT_TYPES,
  type EventType,
  type Page,
} from '../domain.ts';
import type { Effects } from '../effects.ts';
import { invalid } from '../errors.ts';
import { ATTEMPTS_MAX, BODIES_SHOWN_MAX } from '../store/deliveries.ts';
import type { Reads } from '../store/store.ts';
import { inSpareTurn, inTurn } from '../turns.ts';
import type { Answers } from './answers.ts';
import { callerOf } from './auth.ts';
import { notFound } from './errors.ts';
import { PENDING_DELIVERY } from './examples.ts';
import {
  bodySchema,
  creationParameters,
  oneOrMoreOf,
  pageParameters,
  querySchema,
  timestampRoundedDown,
  timestampRoundedUp,
} from './input-schemas.ts';
import type { Pages } from './pages.ts';
import { routeOptions } from './route-options.ts';
import { pathId } from './validation.ts';
import { findVisibleWebhook, visibleWebhook } from './webhooks.ts';

interface ListQuery {
  limit: number;
  cursor?: string;
  status?: DeliveryStatus[];
  event_type?: EventType[];
  created_after?: number;
  created_before?: number;
}

/** The deliveries of events to webhooks, and sending them again. A key sees the deliveries of its own webhooks. */
export function deliveries(reads: Reads, answers: Answers, pages: Pages, effects: Effects): Plugin<void> {
  return {
    name: 'deliveries',
    register(server) {
      server.route<{ Params: { webhook_id: string }; Query: ListQuery }>({
        method: 'GET',
        path: '/v2/webhooks/{webhook_id}/deliveries',
        options: routeOptions({
          scope: 'webhooks:read',
          input: {
            query: querySchema({
              ...pageParameters,
              status: oneOrMoreOf(DELIVERY_STATUSES).description(
                'Only deliveries with this status; may be repeated.',
              ),
              event_type: oneOrMoreOf(EVENT_TYPES).description(
                'Only deliveries of this type of event; may be repeated.',
              ),
              ...creationParameters,
            }),
          },
          operationId: 'listDeliveries',
          summary: 'List deliveries of a webhook',
          description:
            'Newest first. If only few of very many deliveries match the filters, a page may have fewer items than `limit`, or none, and still a `next_cursor` to go on with.',
          responses: { 200: { description: 'A page of deliveries.', pageOf: 'Delivery' } },
        }),
        async handler(request): Promise<Page<Delivery>> {
          const { limit, cursor, status, event_type, created_after, created_before } = request.query;
          const filter = {
            statuses: status?.toSorted() ?? null,
            eventTypes: event_type?.toSorted() ?? null,
            createdAfterMs: created_after ?? null,
            createdBeforeMs: created_before ?? null,
          };
          const caller = callerOf(request);
          const walk = {
            list: 'deliveries',
            filters: { webhookId: request.params.webhook_id, ...filter },
            keyId: caller.keyId,
          };
          // First: a wrong cursor is a wrong value, and those come before visibility.
          const beforeSeq = pages.position(walk, cursor, Number.MAX_SAFE_INTEGER);
          const webhook = visibleWebhook(reads, request);
          return pages.page(walk, await reads.deliveries.page(caller, webhook, filter, beforeSeq, limit));
        },
      });

      server.route<{ Params: { delivery_id: string } }>({
        method: 'GET',
        path: '/v2/deliveries/{delivery_id}',
        options: routeOptions({
          scope: 'webhooks:read',
          operationId: 'getDelivery',
          summary: 'Get a delivery',
          responses: {
            200: { description: 'The delivery, with every attempt.', resource: 'DeliveryDetails' },
          },
        }),
        async handler(request, h) {
          const caller = callerOf(request);
          const id = pathId('dlv', request.params.delivery_id);
          const delivery = reads.deliveries.visibleTo(caller, id);
          if (delivery === undefined) throw notFound();
          // With a thousand attempts it takes 3 ms: 600 at once kept all other requests waiting.
          const inItsTurn = delivery.attempt_count > BODIES_SHOWN_MAX ? inSpareTurn : inTurn;
          const body = await inItsTurn(() => {
            // Whoever asked may have left meanwhile.
            const details = request.active() && reads.deliveries.detailsVisibleTo(caller, id);
            if (!details) throw notFound();
            return JSON.stringify(details);
          }, caller.keyId);
          return h.response(body).type('application/json');
        },
      });

      server.route<{ Params: { delivery_id: string } }>({
        method: 'POST',
        path: '/v2/deliveries/{delivery_id}/redeliver',
        options: routeOptions({
          scope: 'webhooks:write',
          operationId: 'redeliver',
          summary: 'Send a delivery again',
          description:
            'Sends it now, whatever its status, and with all its retries again. It is held while its webhook is disabled.',
          responses: {
            202: {
              description: 'The delivery, pending or held.',
              resource: 'Delivery',
              example: PENDING_DELIVERY,
            },
          },
          errors: { conflict: `The delivery has ${ATTEMPTS_MAX} attempts already.` },
        }),
        handler(request, h) {
          const id = pathId('dlv', request.params.delivery_id);
          const delivery = reads.deliveries.visibleTo(callerOf(request), id);
          return answers.write(request, h, 'deliveries.redeliver', delivery && { id });
        },
      });

      server.route<{
        Params: { webhook_id: string };
        Payload: { since: number; until?: number; status?: DeliveryStatus };
      }>({
        method: 'POST',
        path: '/v2/webhooks/{webhook_id}/replay',
        options: routeOptions({
          scope: 'webhooks:write',
          input: {
            payload: bodySchema({
              since: timestampRoundedUp.required().description('Not in the future.'),
              until: timestampRoundedDown.description('Taken as now if it is left out or in the future.'),
              status: Joi.string()
                .valid(...DELIVERY_STATUSES)
                .description('Only deliveries that have this status now.'),
            }).example({ since: '2026-11-20T08:00:00Z', status: 'exhausted' }),
          },
          operationId: 'replayDeliveries',
          summary: 'Send past deliveries again',
          description: `Sends the deliveries again that were created from \`since\` to \`until\`, both included, each with all its retries. Those that have ${ATTEMPTS_MAX} attempts already, or succeed between the request and their turn, are skipped. It is done in the background, as fast as the receiver takes them.`,
          responses: {
            202: { description: 'The replay, and how many deliveries it sends.', resource: 'Replay' },
          },
          errors: {
            rate_limited:
              'Too many requests, or too many replays of this webhook are open, or of this key are being counted.',
          },
        }),
        handler(request, h) {
          const { since, until, status = null } = request.payload;
          if (until !== undefined && until < since) {
            const rounded = 'once since is rounded up to a millisecond and until down';
            throw invalid('body', 'until', `must not be before since, ${rounded}`);
          }
          const nowMs = effects.now();
          const webhook = findVisibleWebhook(reads, request);
          // Later events are sent anyway.
          const untilMs = Math.min(until ?? nowMs, nowMs);
          const wanted = { sinceMs: since, untilMs, status };
          const isToCome = since > nowMs;
          // Of a visible webhook not before a stored answer was looked for: a repeat gets it also after the clock was set
          // back.
          if (isToCome && webhook === undefined) throw sinceToCome();
          // Read now, as what succeeds while a stored answer is looked for is not sent again.
          const latest = webhook && reads.replays.latest(webhook.id);
          const plan =
            webhook &&
            (async () => {
              if (isToCome) throw sinceToCome();
              return reads.replays.plan(webhook, wanted, latest);
            });
          return answers.writePlanned(request, h, 'replays.create', plan);
        },
      });
    },
  };
}

function sinceToCome() {
  return invalid('body', 'since', 'must not be in the future');
}
