import type { Plugin } from '@hapi/hapi';
import Joi from 'joi';
import { parseWebhookUrl, type UrlRules } from '../address.ts';
import { EVENT_TYPES, type EventType } from '../domain.ts';
import type { Store } from '../store/store.ts';
import { answerWrite } from './answers.ts';
import { callerOf } from './auth.ts';
import { bodySchema } from './validation.ts';

const DESCRIPTION_MAX_LENGTH = 256;

/** `rules`: where deliveries may go beyond public addresses over HTTPS. */
export function webhooks({ writer }: Store, rules: UrlRules): Plugin<void> {
  const url = Joi.string().custom((value: unknown, helpers) => {
    const result = parseWebhookUrl(value, rules);
    return result.ok ? result.url : helpers.error('any.invalid', { reason: result.reason });
  });
  const events = Joi.array()
    .items(Joi.string().valid(...EVENT_TYPES))
    .min(1)
    .unique();
  const description = Joi.string().max(DESCRIPTION_MAX_LENGTH).allow(null, '');

  return {
    name: 'webhooks',
    register(server) {
      server.route<{ Payload: { url: string; events: EventType[]; description?: string | null } }>({
        method: 'POST',
        path: '/v2/webhooks',
        options: {
          auth: { scope: 'webhooks:write' },
          validate: {
            payload: bodySchema({ url: url.required(), events: events.required(), description }),
          },
        },
        handler(request, h) {
          const { url, events, description = null } = request.payload;
          return answerWrite(request, h, writer, {
            operation: 'webhooks.create',
            input: { keyId: callerOf(request).keyId, url, events, description },
            statusCode: 201,
            locationPrefix: '/v2/webhooks/',
          });
        },
      });
    },
  };
}
