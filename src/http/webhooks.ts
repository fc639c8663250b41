import type { Plugin, Request } from '@hapi/hapi';
import Joi from 'joi';
import { parseWebhookUrl, URL_MAX_LENGTH, type UrlRules } from '../address.ts';
import {
  type Attempt,
  EVENT_TYPES,
  type EventType,
  type Page,
  type PingResult,
  WEBHOOK_STATUSES,
  type Webhook,
  type WebhookId,
  type WebhookStatus,
} from '../domain.ts';
import { AppError, wrongKey } from '../errors.ts';
import type { Caller } from '../store/keys.ts';
import type { Reads } from '../store/store.ts';
import { DISABLED_BY, LIVE_SECRETS_MAX, WEBHOOKS_OF_KEY_MAX } from '../store/webhooks.ts';
import type { Answers } from './answers.ts';
import { callerOf } from './auth.ts';
import { notFound } from './errors.ts';
import { PING_ATTEMPT } from './examples.ts';
import { bodySchema, pageParameters, querySchema, textSchema } from './input-schemas.ts';
import type { JsonSchema } from './json-schema.ts';
import type { Pages } from './pages.ts';
import { routeOptions } from './route-options.ts';
import { pathId } from './validation.ts';

/** Sends a ping now, and resolves to its result. */
export type Ping = (webhookId: WebhookId) => Promise<PingResult>;

const DESCRIPTION_MAX_LENGTH = 256;

const EXAMPLE = {
  url: 'https://hooks.example.org/davit',
  events: ['deployment.succeeded', 'deployment.failed'],
  description: 'the status page',
};

/** A day to give all receivers the new secret, as with Stripe and Svix. */
const OVERLAP_DEFAULT_SECONDS = 24 * 60 * 60;
const OVERLAP_MAX_SECONDS = 7 * 24 * 60 * 60;

/**
 * The webhooks that a key registered. `rules`: where deliveries may go besides public addresses over HTTPS;
 * `attemptMaxMs`: how long a ping's attempt may take.
 */
export function webhooks(
  reads: Reads,
  answers: Answers,
  pages: Pages,
  rules: UrlRules,
  ping: Ping,
  attemptMaxMs: number,
): Plugin<void> {
  const url = Joi.string()
    .custom((value: unknown, helpers) => {
      const result = parseWebhookUrl(value, rules);
      return result.ok ? result.url : helpers.error('any.invalid', { reason: result.reason });
    })
    .description(
      'Where to send events: a URL as the WHATWG standard defines it, without user info and fragment; with `https` and a public address, unless the service is set to allow others. The limit on its length applies to its percent-encoded form.',
    )
    .meta({ jsonSchema: urlJsonSchema(rules) });
  const events = Joi.array()
    .items(Joi.string().valid(...EVENT_TYPES))
    .min(1)
    .unique()
    .description('The types of events to send.');
  const description = textSchema(DESCRIPTION_MAX_LENGTH).allow(null, '').description('For people.');
  const status = Joi.string()
    .valid(...WEBHOOK_STATUSES)
    .description('While it is `disabled`, events are held, and sent once it is `enabled` again.');

  /** For each ping under way, the function that ends the wait for it. */
  const underWay = new Set<(error: AppError) => void>();

  return {
    name: 'webhooks',
    register(server) {
      server.ext('onPreStop', () => {
        for (const giveUp of underWay) giveUp(new AppError('unavailable', 'the service is stopping'));
      });

      server.route<{ Payload: { url: string; events: EventType[]; description?: string | null } }>({
        method: 'POST',
        path: '/v2/webhooks',
        options: routeOptions({
          scope: 'webhooks:write',
          input: {
            payload: bodySchema({ url: url.required(), events: events.required(), description }).example(
              EXAMPLE,
            ),
          },
          operationId: 'createWebhook',
          summary: 'Register a webhook',
          description:
            'The webhook is sent the events of the projects that the key sees. Its address must be `https` and public, unless the service is set to allow others.',
          responses: {
            201: { description: 'The webhook, with its secret.', resource: 'WebhookWithSecret' },
          },
          errors: { conflict: `The key has ${WEBHOOKS_OF_KEY_MAX} webhooks already.` },
        }),
        handler(request, h) {
          const { url, events, description = null } = request.payload;
          return answers.write(request, h, 'webhooks.create', {
            keyId: callerOf(request).keyId,
            url,
            events,
            description,
          });
        },
      });

      server.route<{ Query: { limit: number; cursor?: string } }>({
        method: 'GET',
        path: '/v2/webhooks',
        options: routeOptions({
          scope: 'webhooks:read',
          input: { query: querySchema(pageParameters) },
          operationId: 'listWebhooks',
          summary: 'List webhooks',
          description: 'The webhooks that the key registered, newest first.',
          responses: { 200: { description: 'A page of webhooks.', pageOf: 'Webhook' } },
        }),
        handler(request): Page<Webhook> {
          const { limit, cursor } = request.query;
          const caller = callerOf(request);
          const walk = { list: 'webhooks', filters: {}, keyId: caller.keyId };
          const beforeSeq = pages.position(walk, cursor, Number.MAX_SAFE_INTEGER);
          return pages.page(walk, reads.webhooks.page(caller, beforeSeq, limit));
        },
      });

      server.route<{ Params: { webhook_id: string } }>({
        method: 'GET',
        path: '/v2/webhooks/{webhook_id}',
        options: routeOptions({
          scope: 'webhooks:read',
          operationId: 'getWebhook',
          summary: 'Get a webhook',
          responses: { 200: { description: 'The webhook.', resource: 'Webhook' } },
        }),
        handler: (request): Webhook => visibleWebhook(reads, request),
      });

      server.route<{
        Params: { webhook_id: string };
        Payload: { url?: string; events?: EventType[]; description?: string | null; status?: WebhookStatus };
      }>({
        method: 'PATCH',
        path: '/v2/webhooks/{webhook_id}',
        options: routeOptions({
          scope: 'webhooks:write',
          input: {
            payload: bodySchema({ url, events, description, status }).min(1).example({ status: 'enabled' }),
          },
          operationId: 'updateWebhook',
          summary: 'Change a webhook',
          description:
            'Fields that are not in the body stay as they are. Once a disabled webhook is `enabled`, what was held and what waits for a retry is sent at once.',
          responses: { 200: { description: 'The webhook.', resource: 'Webhook' } },
        }),
        handler(request, h) {
          const id = idOfVisible(request);
          const update = id && { id, ...request.payload, disableReason: DISABLED_BY.api };
          return answers.write(request, h, 'webhooks.update', update);
        },
      });

      server.route<{ Params: { webhook_id: string } }>({
        method: 'DELETE',
        path: '/v2/webhooks/{webhook_id}',
        options: routeOptions({
          scope: 'webhooks:write',
          operationId: 'deleteWebhook',
          summary: 'Delete a webhook',
          description: 'Nothing is sent to it any more.',
          responses: { 204: { description: 'The webhook is deleted.' } },
        }),
        handler(request, h) {
          const id = idOfVisible(request);
          return answers.write(request, h, 'webhooks.remove', id && { id });
        },
      });

      server.route<{ Params: { webhook_id: string }; Payload: { overlap_seconds: number } }>({
        method: 'POST',
        path: '/v2/webhooks/{webhook_id}/rotate',
        options: routeOptions({
          scope: 'webhooks:write',
          input: { payload: rotation },
          operationId: 'rotateWebhookSecret',
          summary: 'Replace a signing secret',
          description: `While the old secret overlaps with the new one, deliveries are signed with both: \`Service-Signature\` has a \`v1\` for each. At most ${LIVE_SECRETS_MAX} secrets are valid at a time: one more ends the oldest at once.`,
          responses: {
            200: { description: 'The webhook, with its new secret.', resource: 'WebhookWithSecret' },
          },
        }),
        handler(request, h) {
          const id = idOfVisible(request);
          const overlapMs = request.payload.overlap_seconds * 1000;
          return answers.write(request, h, 'webhooks.rotate', id && { id, overlapMs });
        },
      });

      server.route<{ Params: { webhook_id: string } }>({
        method: 'POST',
        path: '/v2/webhooks/{webhook_id}/ping',
        options: routeOptions({
          scope: 'webhooks:write',
          operationId: 'pingWebhook',
          summary: 'Try a webhook out',
          description: 'Sends an event of type `ping` now, once, and answers with the result.',
          responses: {
            200: { description: 'The attempt.', resource: 'Attempt', example: PING_ATTEMPT },
          },
          errors: { rate_limited: 'Too many requests, or too many pings are under way.' },
        }),
        handler(request, h) {
          const id = idOfVisible(request);
          return answers.attempt(request, h, id && (() => pinged(id, callerOf(request))));
        },
      });
    },
  };

  function idOfVisible(request: Pick<Request, 'auth' | 'params'>): WebhookId | undefined {
    return findVisibleWebhook(reads, request)?.id;
  }

  /** Throws `unauthorized` if the caller's key was revoked meanwhile, also if the ping was sent before. */
  async function pinged(id: WebhookId, { keyId }: Caller): Promise<Attempt> {
    const { promise: givenUp, reject: giveUp } = Promise.withResolvers<never>();
    underWay.add(giveUp);
    const result = await Promise.race([ping(id), givenUp]).finally(() => underWay.delete(giveUp));
    if (reads.keys.get(keyId)?.revoked_at !== null) throw wrongKey();
    switch (result.kind) {
      case 'attempted':
        return result.attempt;
      case 'busy':
        throw new AppError('rate_limited', 'too many pings are under way: wait for their answers', {
          retryAfterSeconds: Math.ceil(attemptMaxMs / 1000), // by then, those under way are over
        });
      case 'gone':
        throw notFound();
      default:
        return result satisfies never;
    }
  }
}

/** The webhook in the path; throws `not_found` if the caller did not register it. */
export function visibleWebhook(reads: Reads, request: Pick<Request, 'auth' | 'params'>): Webhook {
  const webhook = findVisibleWebhook(reads, request);
  if (webhook === undefined) throw notFound();
  return webhook;
}

/** The same; undefined if the caller did not register it. */
export function findVisibleWebhook(
  { webhooks }: Reads,
  request: Pick<Request, 'auth' | 'params'>,
): Webhook | undefined {
  return webhooks.visibleTo(callerOf(request), pathId('whk', String(request.params['webhook_id'])));
}

/** The form of URLs that `parseWebhookUrl` accepts. No pattern can tell whether an address is allowed. */
export function urlJsonSchema({ allowHttp }: Pick<UrlRules, 'allowHttp'>): JsonSchema {
  const scheme = `[Hh][Tt][Tt][Pp]${allowHttp ? '[Ss]?' : '[Ss]'}`;
  return {
    type: 'string',
    maxLength: URL_MAX_LENGTH,
    pattern: `^${scheme}://[^/?@\\s\\\\#]+(?:[/?][^\\s\\\\#]*)?$`,
  };
}

/** A missing body counts as an empty one. */
const rotation = Joi.object({
  overlap_seconds: Joi.number()
    .integer()
    .min(0)
    .max(OVERLAP_MAX_SECONDS)
    .default(OVERLAP_DEFAULT_SECONDS)
    .description('For how many seconds the old secret remains valid.'),
})
  .empty(null)
  .default({ overlap_seconds: OVERLAP_DEFAULT_SECONDS })
  .example({ overlap_seconds: 3600 });
