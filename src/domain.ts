/**
 * The domain: ids, refs, states, events, and the objects that users see over HTTP and in `--json` output. Imports
 * nothing.
 */

declare const brand: unique symbol;
type Branded<Name extends string> = string & { readonly [brand]: Name };

export type ProjectId = Branded<'ProjectId'>;
export type DeploymentId = Branded<'DeploymentId'>;
export type WebhookId = Branded<'WebhookId'>;
export type EventId = Branded<'EventId'>;
export type KeyId = Branded<'KeyId'>;
export type DeliveryId = Branded<'DeliveryId'>;
export type RequestId = Branded<'RequestId'>;
export type Ref = Branded<'Ref'>;

/** Every id is one of these prefixes and an opaque suffix of `[0-9A-Za-z]`. */
export interface IdOfPrefix {
  prj: ProjectId;
  dpl: DeploymentId;
  whk: WebhookId;
  evt: EventId;
  key: KeyId;
  dlv: DeliveryId;
  req: RequestId;
}

export type IdPrefix = keyof IdOfPrefix;

/** In byte order, so that texts sort as the numbers do. */
const BASE62 = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';

/** Milliseconds since 1970 fit until 2081. */
const ID_TIME_LENGTH = 7;
/** 17 characters of 62 are 101 bits: ids do not collide and cannot be guessed. */
const ID_RANDOM_LENGTH = 17;
export const ID_SUFFIX_LENGTH = ID_TIME_LENGTH + ID_RANDOM_LENGTH;

/**
 * A new id. `randomBytes(size)` must come from a CSPRNG. The suffix begins with the time, so that new index entries are
 * adjacent: with 20 deployments in a commit, fully random ids wrote twice as many pages.
 */
export function newId<P extends IdPrefix>(
  prefix: P,
  effects: { now(): number; randomBytes(size: number): Uint8Array },
): IdOfPrefix[P] {
  const suffix = base62(effects.now(), ID_TIME_LENGTH) + randomBase62(ID_RANDOM_LENGTH, effects.randomBytes);
  return `${prefix}_${suffix}` as IdOfPrefix[P];
}

/** A whole number in `length` characters of `[0-9A-Za-z]`; the texts sort as the numbers do. */
export function base62(value: number, length: number): string {
  let text = '';
  for (let rest = value; text.length < length; rest = Math.floor(rest / 62)) {
    text = `${BASE62[rest % 62]}${text}`;
  }
  return text;
}

/** `length` characters of `[0-9A-Za-z]`, each equally likely. */
export function randomBase62(length: number, randomBytes: (size: number) => Uint8Array): string {
  let text = '';
  while (text.length < length) {
    for (const byte of randomBytes(length + 8)) {
      // 248 = 4 × 62: the remaining bytes would make the first eight characters likelier.
      if (byte < 248 && text.length < length) text += BASE62[byte % 62];
    }
  }
  return text;
}

/** `value` as an id if it has the form of one, undefined otherwise. Does not check whether it exists. */
export function parseId<P extends IdPrefix>(prefix: P, value: unknown): IdOfPrefix[P] | undefined {
  if (typeof value !== 'string' || value.length > 64 || !value.startsWith(`${prefix}_`)) return undefined;
  return /^[0-9A-Za-z]+$/.test(value.slice(prefix.length + 1)) ? (value as IdOfPrefix[P]) : undefined;
}

type RefResult = { ok: true; ref: Ref } | { ok: false; reason: string };

const REF_MAX_BYTES = 255;

/**
 * Checks a reference to deploy: what git accepts as a branch, tag or commit, limited to characters that have no special
 * meaning to shells, paths and option parsers. The value is neither trimmed nor changed.
 */
export function parseRef(value: string): RefResult {
  const reason = refProblem(value);
  return reason === undefined ? { ok: true, ref: value as Ref } : { ok: false, reason };
}

function refProblem(value: string): string | undefined {
  if (value === '') return 'must not be empty';
  if (value.length > REF_MAX_BYTES) return `must be at most ${REF_MAX_BYTES} bytes`;
  if (!/^[A-Za-z0-9_]/.test(value)) return 'must begin with a letter a-z or A-Z, a digit or _';
  if (!/^[A-Za-z0-9._\-/+@=,#]+$/.test(value))
    return 'may hold only letters a-z and A-Z, digits and . _ - / + @ = , #';
  if (value === 'HEAD') return 'must name a branch, a tag or a commit, not HEAD';
  for (const part of ['..', '//']) {
    if (value.includes(part)) return `must not contain ${part}`;
  }
  if (value.endsWith('/') || value.endsWith('.')) return 'must not end with / or .';
  for (const part of value.split('/')) {
    if (part.startsWith('.')) return 'must not have a part that begins with .';
    if (part.endsWith('.lock')) return 'must not have a part that ends with .lock';
  }
  return undefined;
}

export const SCOPES = [
  'projects:read',
  'deployments:read',
  'deployments:write',
  'deployments:report',
  'logs:read',
  'webhooks:read',
  'webhooks:write',
] as const;
export type Scope = (typeof SCOPES)[number];

export const PROJECT_STATUSES = ['active', 'paused', 'archived'] as const;
export type ProjectStatus = (typeof PROJECT_STATUSES)[number];

export const QUEUE_POLICIES = ['queue', 'latest'] as const;
export type QueuePolicy = (typeof QUEUE_POLICIES)[number];

export const DEPLOYMENT_STATUSES = [
  'queued',
  'running',
  'canceling',
  'succeeded',
  'failed',
  'canceled',
] as const;
export type DeploymentStatus = (typeof DEPLOYMENT_STATUSES)[number];

export type TerminalStatus = 'succeeded' | 'failed' | 'canceled';

/** Whether a deployment with this status has ended, for good. */
export function isTerminal(status: DeploymentStatus): status is TerminalStatus {
  return status === 'succeeded' || status === 'failed' || status === 'canceled';
}

export const REASONS = [
  'exit_code',
  'signal',
  'timeout',
  'idle_timeout',
  'spawn_failed',
  'interrupted',
  'user',
  'superseded',
  'reported',
  'report_timeout',
] as const;
export type Reason = (typeof REASONS)[number];

/** Limits of a deployment's outputs, whether its command writes them or another system reports them. */
export const OUTPUTS_MAX = 100;
export const OUTPUT_NAME_MAX_LENGTH = 64;
export const OUTPUT_VALUE_MAX_BYTES = 4 * 1024;

export const TRIGGERS = ['api', 'redeploy', 'admin'] as const;
export type Trigger = (typeof TRIGGERS)[number];

export const EVENT_TYPES = [
  'deployment.succeeded',
  'deployment.failed',
  'deployment.created',
  'deployment.started',
  'deployment.canceled',
] as const;
export type EventType = (typeof EVENT_TYPES)[number];

export const WEBHOOK_STATUSES = ['enabled', 'disabled'] as const;
export type WebhookStatus = (typeof WEBHOOK_STATUSES)[number];

export const DELIVERY_STATUSES = ['pending', 'delivered', 'exhausted', 'held'] as const;
export type DeliveryStatus = (typeof DELIVERY_STATUSES)[number];

export const ATTEMPT_TRIGGERS = ['schedule', 'redeliver', 'replay', 'ping'] as const;
export type AttemptTrigger = (typeof ATTEMPT_TRIGGERS)[number];

/**
 * `busy`: too many pings are under way, to the webhook, of its key or in all; `gone`: the webhook was deleted, or its key
 * was revoked.
 */
export type PingResult = { kind: 'attempted'; attempt: Attempt } | { kind: 'busy' } | { kind: 'gone' };

/** A point in time as users see it: ISO 8601, UTC, milliseconds, `Z`. */
export type Timestamp = string;

/** `atMs`: milliseconds since 1970, as in the whole of davit. */
export function timestamp(atMs: number): Timestamp {
  if (atMs !== latest.atMs) latest = { atMs, text: new Date(atMs).toISOString() };
  return latest.text;
}

/** The last result: most timestamps of one request are equal, and formatting each was 2 % of the request's time. */
let latest = { atMs: 0, text: new Date(0).toISOString() };

/** RFC 3339, which requires seconds and an offset; without its leap seconds, which Date does not know. */
export const TIMESTAMP_FORM = /^(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:[0-5]\d)(\.\d{1,9})?(Z|[+-]\d{2}:\d{2})$/;

/** Milliseconds since 1970; undefined if `text` is no valid time. `round` rounds the fraction of a millisecond. */
export function parseTimestamp(text: string, round: (partMs: number) => number): number | undefined {
  const [, local = '', fraction = '', offset = ''] = TIMESTAMP_FORM.exec(text) ?? [];
  // Date accepts the 30th of February as the 2nd of March, and 24:00 as the next day: compare what it understood.
  const localMs = Date.parse(`${local}Z`);
  if (Number.isNaN(localMs) || !new Date(localMs).toISOString().startsWith(local)) return undefined;
  const secondMs = Date.parse(`${local}${offset}`);
  const partMs = Number(fraction.slice(1).padEnd(9, '0')) / 1_000_000;
  return secondMs >= YEAR_0_MS && secondMs < YEAR_10000_MS ? secondMs + round(partMs) : undefined;
}

/** An offset may move the time out of the four-digit years, which are all that `timestamp` can express. */
const YEAR_0_MS = Date.parse('0000-01-01T00:00:00Z');
const YEAR_10000_MS = Date.parse('+010000-01-01T00:00:00Z');

/** As `timestamp`, for a time that may be absent. */
export function optionalTimestamp(atMs: number | null): Timestamp | null {
  return atMs === null ? null : timestamp(atMs);
}

/*
 * The types below have exactly the fields that the API answers and `--json` prints. The store's row mappers create
 * them, and nothing converts them after that.
 */

export interface Project {
  id: ProjectId;
  name: string;
  created_at: Timestamp;
  status: ProjectStatus;
}

export interface Deployment {
  id: DeploymentId;
  project_id: ProjectId;
  ref: Ref;
  status: DeploymentStatus;
  reason: Reason | null;
  message: string | null;
  created_at: Timestamp;
  started_at: Timestamp | null;
  finished_at: Timestamp | null;
  duration_ms: number | null;
  exit_code: number | null;
  signal: string | null;
  /** 1: the next one of its project; null once it has left the queue, and for a project without a command. */
  queue_position: number | null;
  trigger: Trigger;
  /** Null for deployments made on the machine by `davit admin`. */
  created_by: { key_id: KeyId; name: string } | null;
  redeploy_of: DeploymentId | null;
  superseded_by: DeploymentId | null;
  outputs: Record<string, string>;
  /** All bytes of its log, davit's own lines and those that were not kept included. */
  log_bytes: number;
  log_truncated: boolean;
}

export interface Webhook {
  id: WebhookId;
  url: string;
  events: EventType[];
  description: string | null;
  status: WebhookStatus;
  status_reason: string | null;
  created_at: Timestamp;
  last_success_at: Timestamp | null;
  last_failure_at: Timestamp | null;
  consecutive_failures: number;
}

/** The payload that webhooks receive: exactly these fields, in this order. */
export interface DeploymentEvent {
  id: EventId;
  type: EventType;
  created_at: Timestamp;
  data: { deployment_id: DeploymentId; project_id: ProjectId; ref: Ref };
}

export interface Delivery {
  id: DeliveryId;
  event_id: EventId;
  event_type: EventType;
  webhook_id: WebhookId;
  status: DeliveryStatus;
  attempt_count: number;
  next_attempt_at: Timestamp | null;
  created_at: Timestamp;
  delivered_at: Timestamp | null;
}

export interface Attempt {
  number: number;
  at: Timestamp;
  status_code: number | null;
  error: string | null;
  duration_ms: number;
  remote_address: string | null;
  response_body: string | null;
  trigger: AttemptTrigger;
}

export interface Key {
  id: KeyId;
  name: string;
  /** The last four characters of the current secret, to recognise it by. */
  last4: string;
  scopes: Scope[];
  all_projects: boolean;
  project_ids: ProjectId[];
  created_at: Timestamp;
  /** When the current secret replaced another; null if it is the first. */
  rotated_at: Timestamp | null;
  expires_at: Timestamp | null;
  revoked_at: Timestamp | null;
  last_used_at: Timestamp | null;
}

export interface Page<Item> {
  data: Item[];
  next_cursor: string | null;
}
