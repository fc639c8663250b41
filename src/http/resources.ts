import {
  ATTEMPT_TRIGGERS,
  type Attempt,
  DELIVERY_STATUSES,
  DEPLOYMENT_STATUSES,
  type Delivery,
  type Deployment,
  type DeploymentEvent,
  EVENT_TYPES,
  PROJECT_STATUSES,
  type Project,
  REASONS,
  TRIGGERS,
  WEBHOOK_STATUSES,
  type Webhook,
} from '../domain.ts';
import { STATUS_OF_CODE } from '../errors.ts';
import { SIGNING_SECRET_FORM } from '../secrets.ts';
import { BODIES_SHOWN_MAX, type DeliveryDetails } from '../store/deliveries.ts';
import type { Replay } from '../store/replays.ts';
import type { WebhookWithSecret } from '../store/webhooks.ts';
import { EXAMPLE_IDS, idJsonSchema, type JsonSchema, REF_JSON_SCHEMA } from './json-schema.ts';

/*
 * The schemas of all answers, for the API description and for the tests, which validate every answer against it. The
 * types of domain.ts ensure that no field is missing here.
 */

const MOMENT: JsonSchema = {
  type: 'string',
  format: 'date-time',
  pattern: '^\\d{4}-\\d{2}-\\d{2}T\\d{2}:\\d{2}:\\d{2}\\.\\d{3}Z$',
};
const COUNT: JsonSchema = { type: 'integer', minimum: 0 };
const TEXT: JsonSchema = { type: 'string' };

const PROJECT: Described<Project> = {
  description: 'What is deployed. Projects are created on the machine itself, with `davit admin project`.',
  fields: {
    id: idJsonSchema('prj'),
    name: TEXT,
    created_at: MOMENT,
    status: {
      ...oneOf(PROJECT_STATUSES),
      description:
        '`paused` takes deployments and starts none. `archived` refuses new ones with 409. In both, if another system carries them out, its report that a queued one is `running` is 409.',
    },
  },
  example: {
    id: EXAMPLE_IDS.prj,
    name: 'website',
    created_at: '2026-11-01T08:00:00.000Z',
    status: 'active',
  },
};

const DEPLOYMENT: Described<Deployment> = {
  description:
    'One deployment of a ref: `queued`, then `running`, and in the end `succeeded`, `failed` or `canceled`. When a running one is canceled, it is `canceling` until its end.',
  fields: {
    id: idJsonSchema('dpl'),
    project_id: idJsonSchema('prj'),
    ref: { ...REF_JSON_SCHEMA, description: 'The branch, tag or commit to deploy.' },
    status: oneOf(DEPLOYMENT_STATUSES),
    reason: { ...nullable(oneOf(REASONS)), description: 'Why it ended as it did; null while none applies.' },
    message: { ...nullable(TEXT), description: 'More about the reason, for people.' },
    created_at: MOMENT,
    started_at: nullable(MOMENT),
    finished_at: nullable(MOMENT),
    duration_ms: {
      ...nullable(COUNT),
      description:
        'From its start to its end, in milliseconds; null until it has ended, and if it never started.',
    },
    exit_code: {
      ...nullable({ type: 'integer' }),
      description:
        'The exit code of its command; null if davit ended it: canceled, timed out, `interrupted`.',
    },
    signal: {
      ...nullable(TEXT),
      description: 'The signal that ended its command, for instance `SIGKILL`; null if davit ended it.',
    },
    queue_position: {
      ...nullable({ type: 'integer', minimum: 1 }),
      description:
        '1 is the next of its project; null once it has left the queue, and in projects without a command.',
    },
    trigger: { ...oneOf(TRIGGERS), description: 'What created it.' },
    created_by: {
      type: ['object', 'null'],
      description: 'The key that created it; null if it was created on the machine itself.',
      properties: { key_id: idJsonSchema('key'), name: TEXT },
      required: ['key_id', 'name'],
    },
    redeploy_of: { ...nullable(idJsonSchema('dpl')), description: 'The deployment that this one repeats.' },
    superseded_by: {
      ...nullable(idJsonSchema('dpl')),
      description: 'The newer deployment that took the place of this one in the queue.',
    },
    outputs: {
      type: 'object',
      description: 'What the command wrote to the file `DEPLOY_OUTPUT`, or what was reported.',
      additionalProperties: TEXT,
    },
    log_bytes: {
      ...COUNT,
      description:
        'How many bytes its log has, those not kept included: what its command printed, with secrets masked, and the lines of davit.',
    },
    log_truncated: { type: 'boolean', description: 'Whether the middle of the log was left out.' },
  },
  example: {
    id: EXAMPLE_IDS.dpl,
    project_id: EXAMPLE_IDS.prj,
    ref: 'main',
    status: 'succeeded',
    reason: null,
    message: null,
    created_at: '2026-11-21T08:00:00.000Z',
    started_at: '2026-11-21T08:00:00.120Z',
    finished_at: '2026-11-21T08:01:10.620Z',
    duration_ms: 70_500,
    exit_code: 0,
    signal: null,
    queue_position: null,
    trigger: 'api',
    created_by: { key_id: EXAMPLE_IDS.key, name: 'ci' },
    redeploy_of: null,
    superseded_by: null,
    outputs: { url: 'https://example.org' },
    log_bytes: 2048,
    log_truncated: false,
  },
};

const WEBHOOK: Described<Webhook> = {
  description: 'Where events are sent. A key sees the webhooks that it registered.',
  fields: {
    id: idJsonSchema('whk'),
    url: {
      ...TEXT,
      description:
        'Where events are sent: a URL of the WHATWG standard, not always a URI of RFC 3986. It is in the form of that standard: `https://Example.org` becomes `https://example.org/`.',
    },
    events: { type: 'array', items: oneOf(EVENT_TYPES), minItems: 1, uniqueItems: true },
    description: nullable(TEXT),
    status: {
      ...oneOf(WEBHOOK_STATUSES),
      description: 'Events that happen while it is `disabled` are held, and sent once it is `enabled` again.',
    },
    status_reason: { ...nullable(TEXT), description: 'Why it is disabled.' },
    created_at: MOMENT,
    last_success_at: nullable(MOMENT),
    last_failure_at: nullable(MOMENT),
    consecutive_failures: COUNT,
  },
  example: {
    id: EXAMPLE_IDS.whk,
    url: 'https://hooks.example.org/davit',
    events: ['deployment.succeeded', 'deployment.failed'],
    description: 'the status page',
    status: 'enabled',
    status_reason: null,
    created_at: '2026-11-21T08:00:00.000Z',
    last_success_at: null,
    last_failure_at: null,
    consecutive_failures: 0,
  },
};

const SIGNING_SECRET: JsonSchema = {
  type: 'string',
  pattern: SIGNING_SECRET_FORM.source,
  description: 'What deliveries are signed with. Shown in this answer and never again.',
};

const WEBHOOK_WITH_SECRET: Described<WebhookWithSecret> = {
  description: 'A webhook with its new secret.',
  fields: { ...WEBHOOK.fields, signing_secret: SIGNING_SECRET },
  example: {
    ...WEBHOOK.example,
    signing_secret: 'whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD/VZ5IVRsOGQ=',
  },
};

const EVENT: Described<DeploymentEvent> = {
  description: 'What a webhook is sent when a deployment changes.',
  fields: {
    id: { ...idJsonSchema('evt'), description: 'The same at every attempt: drop those you have seen.' },
    type: oneOf(EVENT_TYPES),
    created_at: MOMENT,
    data: {
      type: 'object',
      properties: {
        deployment_id: idJsonSchema('dpl'),
        project_id: idJsonSchema('prj'),
        ref: REF_JSON_SCHEMA,
      },
      required: ['deployment_id', 'project_id', 'ref'],
    },
  },
  example: {
    id: EXAMPLE_IDS.evt,
    type: 'deployment.succeeded',
    created_at: '2026-11-21T08:01:10.620Z',
    data: { deployment_id: EXAMPLE_IDS.dpl, project_id: EXAMPLE_IDS.prj, ref: 'main' },
  },
};

const PING: Described<DeploymentEvent> = {
  description: 'What a webhook is sent when it is tried out with a ping.',
  fields: {
    id: idJsonSchema('evt'),
    type: { type: 'string', const: 'ping' },
    created_at: MOMENT,
    data: { type: 'object', properties: { webhook_id: idJsonSchema('whk') }, required: ['webhook_id'] },
  },
  example: {
    id: EXAMPLE_IDS.evt,
    type: 'ping',
    created_at: '2026-11-21T08:01:10.620Z',
    data: { webhook_id: EXAMPLE_IDS.whk },
  },
};

const ATTEMPT: Described<Attempt> = {
  description: 'One attempt to send an event.',
  fields: {
    number: { type: 'integer', minimum: 1 },
    at: MOMENT,
    status_code: { ...nullable({ type: 'integer' }), description: 'Null when there was no answer.' },
    error: {
      ...nullable(TEXT),
      description: 'Why there was no answer; null when there was one, whatever its status.',
    },
    duration_ms: COUNT,
    remote_address: { ...nullable(TEXT), description: 'The address that was tried last; null if none was.' },
    response_body: {
      ...nullable(TEXT),
      description: `The first 4 KiB of the answer's body; shown for the latest ${BODIES_SHOWN_MAX} attempts of a delivery.`,
    },
    trigger: oneOf(ATTEMPT_TRIGGERS),
  },
  example: {
    number: 1,
    at: '2026-11-21T08:01:10.640Z',
    status_code: 200,
    error: null,
    duration_ms: 84,
    remote_address: '203.0.113.7',
    response_body: 'ok',
    trigger: 'schedule',
  },
};

const DELIVERY: Described<Delivery> = {
  description: 'One event on its way to one webhook.',
  fields: {
    id: idJsonSchema('dlv'),
    event_id: idJsonSchema('evt'),
    event_type: oneOf(EVENT_TYPES),
    webhook_id: idJsonSchema('whk'),
    status: {
      ...oneOf(DELIVERY_STATUSES),
      description: '`held`: its webhook is disabled. `exhausted`: every attempt failed.',
    },
    attempt_count: COUNT,
    next_attempt_at: nullable(MOMENT),
    created_at: MOMENT,
    delivered_at: nullable(MOMENT),
  },
  example: {
    id: EXAMPLE_IDS.dlv,
    event_id: EXAMPLE_IDS.evt,
    event_type: 'deployment.succeeded',
    webhook_id: EXAMPLE_IDS.whk,
    status: 'delivered',
    attempt_count: 1,
    next_attempt_at: null,
    created_at: '2026-11-21T08:01:10.620Z',
    delivered_at: '2026-11-21T08:01:10.724Z',
  },
};

const DELIVERY_DETAILS: Described<DeliveryDetails> = {
  description: 'A delivery with its payload and every attempt.',
  fields: {
    ...DELIVERY.fields,
    payload: schemaReference('Event'),
    attempts: { type: 'array', items: schemaReference('Attempt') },
  },
  example: { ...DELIVERY.example, payload: EVENT.example, attempts: [ATTEMPT.example] },
};

const REPLAY: Described<Replay> = {
  description: 'Past deliveries of a webhook that are sent again, each with all its retries.',
  fields: {
    webhook_id: idJsonSchema('whk'),
    since: MOMENT,
    until: MOMENT,
    status: {
      ...nullable(oneOf(DELIVERY_STATUSES)),
      description: 'Only deliveries that had this status; null: all.',
    },
    count: { ...COUNT, description: 'How many deliveries matched when the replay was created.' },
  },
  example: {
    webhook_id: EXAMPLE_IDS.whk,
    since: '2026-11-20T08:00:00.000Z',
    until: '2026-11-21T08:00:00.000Z',
    status: 'exhausted',
    count: 12,
  },
};

const ERROR_DETAIL: JsonSchema = {
  type: 'object',
  properties: {
    in: oneOf(['body', 'query', 'path', 'header']),
    field: { ...TEXT, description: '`body`, `query` or `path` when it is about all of it.' },
    reason: TEXT,
  },
  required: ['in', 'field', 'reason'],
};

const ERROR: Described<{ error: unknown }> = {
  description: 'The body of every answer that is not 2xx, whatever refused the request.',
  fields: {
    error: {
      type: 'object',
      properties: {
        code: {
          ...oneOf(Object.keys(STATUS_OF_CODE)),
          description: 'For programs. Each goes with one HTTP status.',
        },
        message: { ...TEXT, description: 'For people: what was wrong, and what to do.' },
        request_id: { ...idJsonSchema('req'), description: 'The same as `X-Request-Id`.' },
        details: {
          type: 'array',
          items: ERROR_DETAIL,
          minItems: 1,
          description: 'Left out if there are none.',
        },
      },
      required: ['code', 'message', 'request_id'],
    },
  },
  example: {
    error: {
      code: 'invalid_request',
      message: 'ref: required',
      request_id: EXAMPLE_IDS.req,
      details: [{ in: 'body', field: 'ref', reason: 'required' }],
    },
  },
};

const HEALTH: Described<{ status: 'ok' }> = {
  description: 'All is well.',
  fields: { status: { type: 'string', const: 'ok' } },
  example: { status: 'ok' },
};

/** The schema of every kind of object in answers and events, by its name in the API description. */
export const RESOURCES = {
  Project: objectSchema(PROJECT),
  Deployment: objectSchema(DEPLOYMENT),
  Webhook: objectSchema(WEBHOOK),
  WebhookWithSecret: objectSchema(WEBHOOK_WITH_SECRET),
  Event: objectSchema(EVENT),
  Ping: objectSchema(PING),
  Delivery: objectSchema(DELIVERY),
  DeliveryDetails: objectSchema(DELIVERY_DETAILS),
  Replay: objectSchema(REPLAY),
  Attempt: objectSchema(ATTEMPT),
  Error: objectSchema(ERROR),
  Health: objectSchema(HEALTH),
} satisfies Record<string, JsonSchema>;

export type ResourceName = keyof typeof RESOURCES;

/** One page of a list of these. */
export function pageSchema(name: ResourceName): JsonSchema {
  return {
    type: 'object',
    properties: {
      data: { type: 'array', items: schemaReference(name) },
      next_cursor: {
        type: ['string', 'null'],
        description: 'Send it back as `cursor` for the next page; null on the last one.',
      },
    },
    required: ['data', 'next_cursor'],
  };
}

/** A reference to the schema of a resource, or of a page of them. */
export function schemaReference(name: string): JsonSchema {
  return { $ref: `#/components/schemas/${name}` };
}

/** The example of a resource. */
export function exampleOf(name: ResourceName): Record<string, unknown> {
  return RESOURCES[name].examples[0];
}

interface Described<Resource> {
  description: string;
  fields: { [Field in keyof Required<Resource>]: JsonSchema };
  example: { [Field in keyof Required<Resource>]: unknown };
}

/** Every field is always there; what does not apply is null. */
function objectSchema<Resource>({
  description,
  fields,
  example,
}: Described<Resource>): JsonSchema & { examples: [Described<Resource>['example']] } {
  return {
    type: 'object',
    description,
    properties: fields,
    required: Object.keys(fields),
    examples: [example],
  };
}

function oneOf(values: readonly string[]): JsonSchema {
  return { type: 'string', enum: values };
}

function nullable(schema: JsonSchema): JsonSchema {
  const { type = [], enum: values } = schema;
  return {
    ...schema,
    type: [type, 'null'].flat(),
    ...(values === undefined ? {} : { enum: [...values, null] }),
  };
}
