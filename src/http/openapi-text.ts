import type { EventType } from '../domain.ts';
import { type ErrorCode, type ErrorDetail, wrongKey } from '../errors.ts';
import { keyReused } from '../store/idempotency.ts';
import { endedAlready } from '../store/transitions.ts';
import { notFound } from './errors.ts';
import { idJsonSchema } from './json-schema.ts';
import type { Header } from './openapi-types.ts';

/* The prose of the API description, and what holds for every route. */

export const API_DESCRIPTION = `
davit deploys refs of projects: with a command on its own machine, one at a time and in order within a project, or
through another system that reports its progress. Registered webhooks are sent a signed event at every change.

## Keys

Every request under \`/v2\` needs an API key, except for this description: \`Authorization: Bearer <API_KEY>\`.
A key has scopes, and sees only its projects; anything else is answered as if it did not exist.

## Requests and answers

Bodies are JSON in UTF-8, at most 64 KiB. Unknown fields and parameters are refused by name, values are never converted
(\`"5"\` is not \`5\`), and strings must not contain NUL or lone surrogates. Times are ISO 8601 in UTC with milliseconds.
Ids are opaque. Fields may be added to answers, values to enumerations such as \`status\`, and types of events: ignore
what you do not know.

Every answer carries \`X-Request-Id\`, \`Cache-Control: no-store\` and \`X-Content-Type-Options: nosniff\`.

## Errors

Every error has the same body, and one status goes with each code. The checks come in this order: syntax, key, rate,
scope, parameters and body, visibility, state. A wrong method is 405 with \`Allow\`, an unknown path is 404.

## Pages

Lists come in pages of \`limit\` items. Send \`next_cursor\` back as \`cursor\` with the same filters until it is null:
what existed when you began is seen exactly once, whatever is added meanwhile. Cursors do not expire.

## Repeating a write

After a lost connection you cannot know whether a write was carried out. Send an \`Idempotency-Key\` with every write, and
repeat it with the same key and the same body: the write is carried out once, and the repeat gets the first answer byte
for byte, with \`Idempotent-Replayed: true\`. Only successes are remembered, for at least 24 hours. The same key with
another request is 422.

## Rates

\`RateLimit\` tells how many requests are left. After 429, \`Retry-After\` tells in how many seconds there is one again, or
if another limit was met, such as that of queued deployments, in how many it is worth trying again.
`.trim();

/** Each has the name of the plugin whose routes it holds; in reading order. */
export const TAGS: { name: string; description: string }[] = [
  { name: 'projects', description: 'What can be deployed.' },
  { name: 'deployments', description: 'Deploy refs, and follow their progress.' },
  { name: 'logs', description: 'What the commands of deployments print.' },
  { name: 'webhooks', description: 'Where events are sent.' },
  { name: 'deliveries', description: 'How events were delivered to webhooks, and sending them again.' },
  { name: 'events', description: 'What webhooks are sent.' },
  { name: 'health', description: 'For load balancers and supervisors.' },
  { name: 'description', description: 'This description.' },
];

interface ErrorText {
  /** When it is sent. */
  when: string;
  /** An example of its messages. */
  message: string;
  details?: ErrorDetail[];
  headers?: readonly (keyof typeof HEADERS)[];
}

/** davit's response headers, without those that every server sends. */
export const HEADERS = {
  'X-Request-Id': {
    description: "Identifies this request in the service's log.",
    required: true,
    schema: idJsonSchema('req'),
  },
  'RateLimit-Policy': {
    description: 'How many requests (`q`) in how many seconds (`w`). Missing where there is no limit.',
    schema: { type: 'string', pattern: '^"[a-z-]+";q=\\d+;w=\\d+$', examples: ['"default";q=600;w=60'] },
  },
  RateLimit: {
    description: 'How many requests are left (`r`), and in how many seconds there will be more (`t`).',
    schema: { type: 'string', pattern: '^"[a-z-]+";r=\\d+;t=\\d+$', examples: ['"default";r=599;t=1'] },
  },
  'Retry-After': {
    description: 'In how many seconds it is worth sending the request again.',
    required: true,
    schema: { type: 'integer', minimum: 1 },
  },
  'WWW-Authenticate': { required: true, schema: { type: 'string', const: 'Bearer' } },
  Location: {
    description: 'The path of the new resource.',
    required: true,
    schema: { type: 'string', format: 'uri-reference' },
  },
  'Idempotent-Replayed': {
    description: '`true` when this is the stored answer to an earlier request with the same Idempotency-Key.',
    schema: { type: 'string', const: 'true' },
  },
} satisfies Record<string, Header>;

/** The headers of answers for which the rate of a key, or of failed authentications, was counted. */
export const LIMITED = ['RateLimit-Policy', 'RateLimit'] as const;

/** An error that a route can answer with, so not 405, which is sent where there is no route. */
export type RouteError = Exclude<ErrorCode, 'method_not_allowed'>;

export const ROUTE_ERRORS: Record<RouteError, ErrorText> = {
  invalid_request: {
    when: 'A parameter, header or the body is missing or malformed.',
    message: 'limit: must be a whole number from 1 to 200',
    details: [{ in: 'query', field: 'limit', reason: 'must be a whole number from 1 to 200' }],
    headers: LIMITED,
  },
  unauthorized: {
    when: 'The key is missing, malformed, wrong, expired or revoked.',
    message: wrongKey().message,
    headers: ['WWW-Authenticate', ...LIMITED],
  },
  forbidden: {
    when: 'The key lacks the scope; the message names it.',
    message: 'this key lacks the scope deployments:write: use a key that has it, or ask for one',
    headers: LIMITED,
  },
  not_found: {
    when: 'There is no such resource, or this key does not see it.',
    message: notFound().message,
    headers: LIMITED,
  },
  request_timeout: {
    when: 'The request did not arrive in time.',
    message: 'the request did not arrive in time: send it again',
  },
  conflict: {
    when: 'The state of the resource forbids it.',
    message: endedAlready('succeeded').message,
    headers: LIMITED,
  },
  payload_too_large: {
    when: 'The body is larger than 64 KiB.',
    message: 'the body must be at most 65536 bytes',
  },
  unsupported_media_type: {
    when: 'The body is not JSON, or is compressed.',
    message: 'the body must be JSON: Content-Type: application/json',
  },
  idempotency_key_reused: {
    when: 'This Idempotency-Key was used for another request.',
    message: keyReused().message,
    details: keyReused().details,
    headers: LIMITED,
  },
  rate_limited: {
    when: 'Too many requests.',
    message: 'too many requests: wait 1 s',
    headers: ['Retry-After', ...LIMITED],
  },
  headers_too_large: {
    when: 'The headers and the path are larger than 16 KiB together, or there are more than 1,000 headers.',
    message: 'the headers and the path are too large: at most 16 KiB together, and at most 1,000 headers',
  },
  internal_error: {
    when: 'A bug in the service.',
    message: 'something went wrong inside the service; its log tells more under the id of this request',
    headers: LIMITED,
  },
  unavailable: {
    when: 'The disk is full, or the service is overloaded or stopping.',
    message: 'the disk is full: nothing was written; try again once there is room',
    headers: ['Retry-After', ...LIMITED],
  },
};

/** When each type of event is sent. */
export const EVENT_MEANINGS: Record<EventType | 'ping', string> = {
  'deployment.succeeded': 'A deployment has succeeded',
  'deployment.failed': 'A deployment has failed',
  'deployment.created': 'A deployment was created',
  'deployment.started': 'A deployment has started',
  'deployment.canceled': 'A deployment was canceled',
  ping: 'A webhook is tried out',
};

/**
 * The headers of every event; src/deliver/sign.ts makes them. The example signatures verify: they sign the example of
 * `deployment.succeeded`, as it is sent, with the example of a secret.
 */
export const EVENT_HEADERS: Record<string, { description: string; example: string }> = {
  'Service-Signature': {
    description:
      '`t=<unix time>,v1=<hex digest>`: the HMAC-SHA256 of `<t>.<raw body>`, keyed with the whole `signing_secret`. One `v1` for each live secret while a rotation overlaps. Refuse it if `t` and your clock differ by more than 300 seconds.',
    example: 't=1795248070,v1=4b381a26697e1fc5e466dc7fdb2f0cf7f8e5f75342ab4c38357b73a42a0dabb0',
  },
  'webhook-id': { description: 'The id of the event.', example: 'evt_Vb7zXcVbN1mAsDfGhJkLqWeR' },
  'webhook-timestamp': { description: 'When it was sent, in seconds since 1970.', example: '1795248070' },
  'webhook-signature': {
    description:
      '`v1,<base64>`, for Standard Webhooks libraries; several, separated by spaces, while a rotation overlaps.',
    example: 'v1,sywvn2hUDokfovWNmFP+ZTxecqzxpRopCGomsqlUcPQ=',
  },
};
