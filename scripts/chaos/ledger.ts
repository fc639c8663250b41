import { appendFileSync } from 'node:fs';
import {
  type Deployment,
  type EventType,
  isTerminal,
  type Webhook,
  type WebhookStatus,
} from '../../src/domain.ts';

/*
 * What davit has acknowledged, kept out of its reach: in memory, and as lines in an append-only file. All checks
 * compare with this.
 */

/** A broken promise of davit's. */
export interface Violation {
  rule: string;
  detail: string;
}

/** One write as a client means it, however often it is sent. */
export interface WriteIntent {
  number: number;
  /** For people: `deploy`, `cancel`, … */
  name: string;
  keyId: string;
  keySecret: string;
  method: 'POST' | 'PATCH' | 'DELETE';
  path: string;
  body: unknown;
  idempotencyKey: string | null;
  /** The status of success. */
  expectedStatus: number;
  /** Statuses that are allowed too, and mean that nothing was written. */
  refusals: readonly number[];
}

export interface Answer {
  status: number;
  location: string | null;
  body: string;
}

/**
 * `acknowledged`: it was answered with a 2xx. `refused`: every sending was refused, so it must not have been carried
 * out. `doubtful`: an answer was lost and no repeat was acknowledged, so it may have been carried out once.
 */
export type WriteFate = 'open' | 'acknowledged' | 'refused' | 'doubtful';

export interface WriteEntry extends WriteIntent {
  fate: WriteFate;
  answer: Answer | null;
}

/** A deployment that was acknowledged. */
export interface KnownDeployment {
  id: string;
  projectId: string;
  ref: string;
  trigger: string;
  keyId: string | null;
  redeployOf: string | null;
  createdAt: string;
  /** When the first request for it was sent, and when it was first answered, by performance.now(). */
  sentAtMs: number;
  acknowledgedAtMs: number;
  /** Its cancellation was requested, whether acknowledged or not. */
  cancelAsked: boolean;
  /** The cancellation was acknowledged while it was queued: it must never run. */
  canceledInQueue: boolean;
  /** How it ended, once davit has said so. */
  end: { status: string; reason: string | null; finishedAt: string | null; notedAtMs: number } | null;
}

/** A webhook that was acknowledged. */
export interface KnownWebhook {
  id: string;
  path: string;
  keyId: string;
  url: string;
  events: EventType[];
  description: string | null;
  status: WebhookStatus;
  /** All secrets that were given out, the newest last. */
  secrets: string[];
  deleted: boolean;
  /** Its subscription is certain for deployments requested after the first and events before the second. */
  subscribedSinceMs: number;
  changeSentAtMs: number;
  /** Whether it is being changed: with one change at a time, its state is certain. */
  busy: boolean;
}

export interface Ledger {
  violations: readonly Violation[];
  writes: readonly WriteEntry[];
  deployments: ReadonlyMap<string, KnownDeployment>;
  webhooks: ReadonlyMap<string, KnownWebhook>;
  /** The fate of the one request for each ref, which says how many deployments of it there must or may be. */
  refs: Map<string, WriteFate>;
  /** Projects and keys that admin commands created. */
  made: { kind: 'projects' | 'keys'; id: string; name: string }[];
  counts: { acknowledged: number; refused: number; doubtful: number; repeats: number };
  violation(rule: string, detail: string): void;
  intend(intent: Omit<WriteIntent, 'number'>): WriteEntry;
  /** Notes a 2xx; `replayed`: davit said that it is the stored answer to an earlier request. */
  acknowledge(entry: WriteEntry, answer: Answer, replayed: boolean): void;
  close(entry: WriteEntry, fate: 'refused' | 'doubtful'): void;
  deploymentMade(deployment: Deployment, sentAtMs: number): void;
  /** Notes what davit showed when it acknowledged a cancellation. */
  deploymentCanceled(deployment: Deployment): void;
  /**
   * Compares a deployment that davit shows with what it said before. `askedAtMs`: when it was requested, by
   * performance.now(), as answers can overtake each other; 0 for an answer that may be a stored, old one.
   */
  observe(deployment: Deployment, askedAtMs?: number): void;
  webhookMade(webhook: Webhook & { signing_secret: string }, path: string, keyId: string): void;
  /** Writes a line to the file, for people who read it afterwards. */
  note(line: Record<string, unknown>): void;
}

/** More would tell nothing new, and fill the memory. */
const VIOLATIONS_MAX = 200;

/** Creates a ledger that writes its lines to `file`. */
export function createLedger(file: string): Ledger {
  const violations: Violation[] = [];
  const writes: WriteEntry[] = [];
  const deployments = new Map<string, KnownDeployment>();
  const webhooks = new Map<string, KnownWebhook>();
  const counts = { acknowledged: 0, refused: 0, doubtful: 0, repeats: 0 };

  return {
    violations,
    writes,
    deployments,
    webhooks,
    refs: new Map(),
    made: [],
    counts,
    violation,
    intend(intent) {
      const entry: WriteEntry = { ...intent, number: writes.length + 1, fate: 'open', answer: null };
      writes.push(entry);
      return entry;
    },
    acknowledge,
    close(entry, fate) {
      if (entry.fate !== 'open') return;
      entry.fate = fate;
      counts[fate] += 1;
      note({ fate, write: entry.number, name: entry.name, path: entry.path });
    },
    deploymentMade,
    deploymentCanceled(deployment) {
      const known = deployments.get(deployment.id);
      if (known !== undefined)
        known.canceledInQueue ||= deployment.status === 'canceled' && deployment.started_at === null;
      observe(deployment);
    },
    observe,
    webhookMade(webhook, path, keyId) {
      if (webhooks.has(webhook.id)) return;
      const { id, url, events, description, status, signing_secret } = webhook;
      webhooks.set(id, {
        ...{ id, path, keyId, url, events, description, status },
        secrets: [signing_secret],
        deleted: false,
        subscribedSinceMs: performance.now(),
        changeSentAtMs: Number.POSITIVE_INFINITY,
        busy: false,
      });
    },
    note,
  };

  function violation(rule: string, detail: string): void {
    note({ violation: rule, detail });
    if (violations.length < VIOLATIONS_MAX) violations.push({ rule, detail });
  }

  function note(line: Record<string, unknown>): void {
    appendFileSync(file, `${JSON.stringify({ at: new Date().toISOString(), ...line })}\n`);
  }

  function acknowledge(entry: WriteEntry, answer: Answer, replayed: boolean): void {
    const { name, number, method, path } = entry;
    if (answer.status !== entry.expectedStatus) {
      violation(
        'answers',
        `${method} ${path} was answered with ${answer.status}, not ${entry.expectedStatus}`,
      );
    }
    if (entry.answer === null) {
      entry.answer = answer;
      entry.fate = 'acknowledged';
      counts.acknowledged += 1;
      const { keyId, idempotencyKey } = entry;
      note({ acknowledged: number, name, method, path, keyId, idempotencyKey, answer, replayed });
      return;
    }
    counts.repeats += 1;
    if (JSON.stringify(entry.answer) !== JSON.stringify(answer)) {
      violation(
        'one answer for each Idempotency-Key',
        `${method} ${path} with the key ${entry.idempotencyKey}: first ${JSON.stringify(entry.answer)}, then ${JSON.stringify(answer)}`,
      );
    }
  }

  function deploymentMade(deployment: Deployment, sentAtMs: number): void {
    if (deployments.has(deployment.id)) return;
    deployments.set(deployment.id, {
      id: deployment.id,
      ...valuesThatStay(deployment),
      sentAtMs,
      acknowledgedAtMs: performance.now(),
      cancelAsked: false,
      canceledInQueue: false,
      end: null,
    });
  }

  function observe(deployment: Deployment, askedAtMs = 0): void {
    const known = deployments.get(deployment.id);
    if (known === undefined) return;
    for (const [name, value] of Object.entries(valuesThatStay(deployment))) {
      const before = known[name as keyof KnownDeployment];
      if (value !== before) {
        violation('acknowledged values stay', `${known.id}: ${name} was ${before} and is ${value}`);
      }
    }
    if (!isTerminal(deployment.status)) {
      if (known.end !== null && askedAtMs > known.end.notedAtMs) {
        violation('an end is for ever', `${known.id} was ${known.end.status} and is ${deployment.status}`);
      }
      return;
    }
    const { status, reason, finished_at: finishedAt } = deployment;
    known.end ??= { status, reason, finishedAt, notedAtMs: performance.now() };
    const { end } = known;
    if (end.status !== status || end.reason !== reason || end.finishedAt !== finishedAt) {
      violation(
        'an end is for ever',
        `${known.id} was ${JSON.stringify(end)} and is ${JSON.stringify({ status, reason, finishedAt })}`,
      );
    }
  }
}

/** What of a deployment never changes. */
function valuesThatStay(deployment: Deployment) {
  return {
    projectId: deployment.project_id,
    ref: deployment.ref,
    trigger: deployment.trigger,
    keyId: deployment.created_by?.key_id ?? null,
    redeployOf: deployment.redeploy_of,
    createdAt: deployment.created_at,
  };
}
