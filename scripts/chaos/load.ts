import { setTimeout as delay } from 'node:timers/promises';
import type { Delivery, Deployment, Webhook } from '../../src/domain.ts';
import type { Administration } from './administration.ts';
import type { Client, Outcome } from './client.ts';
import type { KnownDeployment, KnownWebhook, Ledger, WriteEntry, WriteIntent } from './ledger.ts';
import { COMMAND_PROJECTS, type Fate, type Load, type Sending } from './plan.ts';
import type { Receivers } from './receivers.ts';

/** An API key that the load uses. */
export interface ApiKey {
  id: string;
  secret: string;
  /** Null: all. */
  projectIds: ReadonlySet<string> | null;
}

interface Loader {
  /** Does a step of the plan; resolves when all its writes are acknowledged, refused or given up. */
  perform(load: Load): Promise<void>;
  /** Repeats unanswered writes no more: from now on they are given up. */
  giveUp(): void;
}

interface LoaderOptions {
  client: Client;
  ledger: Ledger;
  receivers: Receivers;
  administration: Administration;
  /** Those with a command first. */
  projectIds: readonly string[];
  keys: readonly ApiKey[];
}

/** Between two sendings of a write whose answer was lost. */
const REPEAT_AFTER_MS = 250;
/** Steps pick among so many of the newest deployments, as older ones have ended. */
const YOUNG = 60;

/** Turns steps of the plan into requests, and their answers into lines of the ledger. */
export function createLoader(options: LoaderOptions): Loader {
  const { client, ledger, receivers, administration, projectIds, keys } = options;
  let givenUp = false;

  return {
    perform,
    giveUp() {
      givenUp = true;
    },
  };

  async function perform(load: Load): Promise<void> {
    switch (load.kind) {
      case 'deploy':
        return await deploy(load);
      case 'cancel':
        return await cancel(load);
      case 'redeploy':
        return await redeploy(load);
      case 'report':
        return await report(load);
      case 'register':
        return await register(load);
      case 'describe':
      case 'disable':
      case 'enable':
      case 'remove':
      case 'ping':
      case 'replay':
      case 'subscribe':
      case 'rotate':
        return await changeWebhook(load);
      case 'redeliver':
        return await redeliver(load);
      case 'repeat':
        return await repeat(load.pick);
      case 'read':
        return await read(load.what, load.pick);
      case 'administer':
        return await administration.perform(load.what, load.pick);
      case 'backup':
        return await administration.backup();
      default:
        load satisfies never;
    }
  }

  async function deploy({ project, command, sending }: Load & { kind: 'deploy' }): Promise<void> {
    const projectId = projectIds[project % projectIds.length] ?? '';
    const ref = `${project < COMMAND_PROJECTS ? command : 'reported'}/${ledger.writes.length + 1}`;
    const key = keyFor(projectId, ledger.writes.length);
    const sentAtMs = performance.now();
    ledger.refs.set(ref, 'open');
    const entry = await write(
      {
        ...of(key),
        name: 'deploy',
        method: 'POST',
        path: `/v2/projects/${projectId}/deployments`,
        body: { ref },
        expectedStatus: 201,
        refusals: [429],
      },
      sending,
    );
    ledger.refs.set(ref, entry.fate);
    if (entry.answer !== null) ledger.deploymentMade(JSON.parse(entry.answer.body) as Deployment, sentAtMs);
  }

  async function cancel({ pick, sending }: Load & { kind: 'cancel' | 'redeploy' }): Promise<void> {
    const known = young(pick, ({ end }) => end === null);
    if (known === undefined) return;
    known.cancelAsked = true;
    const entry = await write(
      {
        ...of(keyFor(known.projectId, 0)),
        name: 'cancel',
        method: 'POST',
        path: `/v2/deployments/${known.id}/cancel`,
        body: undefined,
        expectedStatus: 202,
        refusals: [409],
      },
      sending,
    );
    if (entry.answer !== null) ledger.deploymentCanceled(JSON.parse(entry.answer.body) as Deployment);
  }

  async function redeploy({ pick, sending }: Load & { kind: 'cancel' | 'redeploy' }): Promise<void> {
    const known = young(pick, () => true);
    if (known === undefined) return;
    const sentAtMs = performance.now();
    const entry = await write(
      {
        ...of(keyFor(known.projectId, 0)),
        name: 'redeploy',
        method: 'POST',
        path: `/v2/deployments/${known.id}/redeploy`,
        body: undefined,
        expectedStatus: 201,
        refusals: [429],
      },
      sending,
    );
    if (entry.answer !== null) ledger.deploymentMade(JSON.parse(entry.answer.body) as Deployment, sentAtMs);
  }

  async function report({ pick, status, sending }: Load & { kind: 'report' }): Promise<void> {
    const known = young(pick, ({ end, ref }) => end === null && ref.startsWith('reported/'));
    if (known === undefined) return;
    const entry = await write(
      {
        ...of(keyFor(known.projectId, 0)),
        name: 'report',
        method: 'POST',
        path: `/v2/deployments/${known.id}/report`,
        body: { status, message: `as write ${ledger.writes.length + 1} says` },
        expectedStatus: 200,
        refusals: [409],
      },
      sending,
    );
    if (entry.answer !== null) ledger.observe(JSON.parse(entry.answer.body) as Deployment);
  }

  async function register({ receiver, events, sending }: Load & { kind: 'register' }): Promise<void> {
    const { url, path } = receivers.newUrl(receiver);
    const key = keys[ledger.writes.length % keys.length] ?? must(keys[0]);
    const entry = await write(
      {
        ...of(key),
        name: 'register',
        method: 'POST',
        path: '/v2/webhooks',
        body: { url, events, description: path },
        expectedStatus: 201,
        refusals: [],
      },
      // With an Idempotency-Key, as nobody would know the secret if the answer were lost.
      { ...sending, idempotent: true },
    );
    if (entry.answer === null) return;
    ledger.webhookMade(JSON.parse(entry.answer.body), path, key.id);
  }

  type Change = Extract<Load, { pick: number; sending: Sending }> & {
    kind: 'describe' | 'disable' | 'enable' | 'remove' | 'ping' | 'replay' | 'subscribe' | 'rotate';
  };

  /** Makes one change of a webhook at a time, so that its state is certain after each. */
  async function changeWebhook(load: Change): Promise<void> {
    const free = [...ledger.webhooks.values()].filter(({ deleted, busy }) => !deleted && !busy);
    // So many stay that there are always deliveries.
    if (load.kind === 'remove' && free.length < 12) return;
    const known = picked(free, load.pick);
    const key = keys.find(({ id }) => id === known?.keyId);
    if (known === undefined || key === undefined) return;
    const request = changeRequest(load, known);
    known.busy = true;
    if (load.kind === 'subscribe' || load.kind === 'remove') known.changeSentAtMs = performance.now();
    // With an Idempotency-Key, as its effect would be unknown if the answer were lost.
    const entry = await write(
      // 400: while davit's clock is set back, the replay would begin in the future.
      { ...of(key), name: load.kind, refusals: load.kind === 'replay' ? [400] : [], ...request },
      { ...load.sending, idempotent: true },
    );
    if (entry.answer !== null) noteChange(load, known, entry.answer.body);
    // A webhook whose change is in doubt is not changed again.
    known.busy = entry.fate === 'doubtful';
  }

  function noteChange({ kind }: Change, known: KnownWebhook, body: string): void {
    if (kind === 'ping' || kind === 'replay') return;
    if (kind === 'remove') {
      known.deleted = true;
      return;
    }
    const webhook = JSON.parse(body) as Webhook & { signing_secret?: string };
    const { events, description, status, signing_secret } = webhook;
    Object.assign(known, { events, description });
    if (kind === 'disable' || kind === 'enable') known.status = status;
    if (signing_secret !== undefined) known.secrets.push(signing_secret);
    if (kind === 'subscribe') {
      known.subscribedSinceMs = performance.now();
      known.changeSentAtMs = Number.POSITIVE_INFINITY;
    }
  }

  async function redeliver({ pick, deliveryPick, sending }: Load & { kind: 'redeliver' }): Promise<void> {
    const known = picked(
      [...ledger.webhooks.values()].filter(({ deleted, busy }) => !deleted && !busy),
      pick,
    );
    const key = keys.find(({ id }) => id === known?.keyId);
    if (known === undefined || key === undefined) return;
    const outcome = await get(key, `/v2/webhooks/${known.id}/deliveries?limit=20`, known);
    if (outcome?.status !== 200) return;
    const page = JSON.parse(outcome.body) as { data: Delivery[] };
    const delivery = picked(page.data, deliveryPick);
    if (delivery === undefined) return;
    await write(
      {
        ...of(key),
        name: 'redeliver',
        method: 'POST',
        path: `/v2/deliveries/${delivery.id}/redeliver`,
        body: undefined,
        expectedStatus: 202,
        // 404: the webhook may have been deleted meanwhile.
        refusals: [404],
      },
      sending,
    );
  }

  /** Repeats an old write: the answer must be the old one, byte for byte. */
  async function repeat(pick: number): Promise<void> {
    const entry = picked(
      ledger.writes.filter(({ answer, idempotencyKey }) => answer !== null && idempotencyKey !== null),
      pick,
    );
    if (entry === undefined) return;
    await send(entry, 'waits', true);
  }

  async function read(what: (Load & { kind: 'read' })['what'], pick: number): Promise<void> {
    const known = young(pick, () => true);
    const webhook = picked([...ledger.webhooks.values()], pick);
    const key = must(keys[0]);
    const askedAtMs = performance.now();
    switch (what) {
      case 'deployment':
      case 'wait': {
        if (known === undefined) return;
        const outcome = await get(
          key,
          `/v2/deployments/${known.id}${what === 'wait' ? '?wait=2' : ''}`,
          known,
        );
        if (outcome?.status === 200) ledger.observe(JSON.parse(outcome.body) as Deployment);
        return;
      }
      case 'list': {
        const outcome = await get(key, '/v2/deployments?limit=100');
        if (outcome?.status !== 200) return;
        const page = JSON.parse(outcome.body) as { data: Deployment[] };
        for (const deployment of page.data) ledger.observe(deployment, askedAtMs);
        return;
      }
      case 'log':
        if (known !== undefined) await get(key, `/v2/deployments/${known.id}/logs?tail=2000`, known);
        return;
      case 'webhook':
      case 'deliveries': {
        const owner = keys.find(({ id }) => id === webhook?.keyId);
        if (webhook === undefined || owner === undefined) return;
        await get(owner, `/v2/webhooks/${webhook.id}${what === 'webhook' ? '' : '/deliveries'}`, webhook);
        return;
      }
      default:
        what satisfies never;
    }
  }

  /** Undefined: it was not answered. `known`, which was acknowledged, must be found unless it is being deleted. */
  async function get(key: ApiKey, path: string, known?: KnownDeployment | KnownWebhook) {
    const outcome = await client.call({ method: 'GET', path, keySecret: key.secret });
    if (outcome.kind === 'unanswered') return undefined;
    const isThere = known !== undefined && !('deleted' in known && (known.deleted || known.busy));
    if (outcome.status === 404 && isThere) {
      ledger.violation('what was acknowledged is found', `GET ${path} → 404`);
    } else if (![200, 404, 429, 503].includes(outcome.status)) {
      ledger.violation('answers', `GET ${path} → ${outcome.status} ${outcome.body}`);
    }
    return outcome;
  }

  /** Sends a write, in several copies at a time if the plan says so, and again until its fate is known. */
  async function write(
    intent: Omit<WriteIntent, 'number' | 'idempotencyKey'>,
    { fate, idempotent, copies }: Sending,
  ): Promise<WriteEntry> {
    const idempotencyKey = idempotent ? `chaos-${ledger.writes.length + 1}` : null;
    const entry = ledger.intend({ ...intent, idempotencyKey });
    const verdicts = await Promise.all(
      Array.from({ length: idempotent ? copies : 1 }, (_, copy) =>
        send(entry, copy === 0 ? fate : 'waits', false),
      ),
    );
    if (verdicts.every((verdict) => verdict === 'refused')) ledger.close(entry, 'refused');
    else if (!idempotent || verdicts.includes('refused')) ledger.close(entry, 'doubtful');
    while (entry.fate === 'open') {
      await delay(REPEAT_AFTER_MS);
      if (givenUp) ledger.close(entry, 'doubtful');
      // An earlier sending may have been carried out, of which this refusal says nothing.
      else if ((await send(entry, 'waits', true)) === 'refused') ledger.close(entry, 'doubtful');
    }
    return entry;
  }

  async function send(
    entry: WriteEntry,
    fate: Fate,
    isRepeat: boolean,
  ): Promise<'acknowledged' | 'refused' | 'unknown'> {
    const { method, path, keySecret, body, idempotencyKey, refusals } = entry;
    const wasAcknowledged = entry.answer !== null;
    const outcome = await client.call({ method, path, keySecret, body, idempotencyKey, fate });
    if (outcome.kind === 'unanswered') return 'unknown';
    const { status } = outcome;
    if (status >= 200 && status < 300) {
      const replayed = outcome.headers.get('idempotent-replayed') === 'true';
      if (wasAcknowledged && isRepeat && !replayed) {
        ledger.violation('a repeat is said to be one', `${method} ${path} with the key ${idempotencyKey}`);
      }
      ledger.acknowledge(entry, answerOf(outcome), replayed);
      return 'acknowledged';
    }
    if (status === 503) return 'unknown';
    // Even if the answer is remembered: limits, visibility (deleted things are not visible) and the clock are checked
    // first.
    const isBeforeMemory = status === 429 || status === 404 || (status === 400 && refusals.includes(400));
    if (wasAcknowledged && isBeforeMemory) return 'unknown';
    // The rate limit is never reached: 429 means a full queue, or too many replays or pings.
    if (entry.answer === null && (refusals.includes(status) || status === 429)) return 'refused';
    ledger.violation('answers', `${method} ${path} (${idempotencyKey}) → ${status} ${outcome.body}`);
    return 'refused';
  }

  function young(pick: number, fits: (known: KnownDeployment) => boolean): KnownDeployment | undefined {
    return picked(
      [...ledger.deployments.values()]
        .slice(-YOUNG * 3)
        .filter(fits)
        .slice(-YOUNG),
      pick,
    );
  }

  function keyFor(projectId: string, number: number): ApiKey {
    const able = keys.filter(({ projectIds: seen }) => seen === null || seen.has(projectId));
    return must(able[number % able.length]);
  }
}

function changeRequest(
  load: { kind: string; events?: string[]; overlapSeconds?: number; pick: number },
  { id }: KnownWebhook,
): Pick<WriteIntent, 'method' | 'path' | 'body' | 'expectedStatus'> {
  const path = `/v2/webhooks/${id}`;
  const patch = (body: object) => ({ method: 'PATCH', path, body, expectedStatus: 200 }) as const;
  switch (load.kind) {
    case 'describe':
      return patch({ description: `described at ${load.pick}` });
    case 'disable':
      return patch({ status: 'disabled' });
    case 'enable':
      return patch({ status: 'enabled' });
    case 'subscribe':
      return patch({ events: load.events });
    case 'remove':
      return { method: 'DELETE', path, body: undefined, expectedStatus: 204 };
    case 'rotate':
      return {
        method: 'POST',
        path: `${path}/rotate`,
        body: { overlap_seconds: load.overlapSeconds },
        expectedStatus: 200,
      };
    case 'ping':
      return { method: 'POST', path: `${path}/ping`, body: undefined, expectedStatus: 200 };
    default:
      return {
        method: 'POST',
        path: `${path}/replay`,
        body: { since: new Date(Date.now() - 20_000).toISOString() },
        expectedStatus: 202,
      };
  }
}

function of({ id, secret }: ApiKey) {
  return { keyId: id, keySecret: secret };
}

function answerOf(outcome: Outcome & { kind: 'answered' }) {
  return { status: outcome.status, location: outcome.headers.get('location'), body: outcome.body };
}

function picked<Item>(items: readonly Item[], pick: number): Item | undefined {
  return items[Math.floor(pick * items.length)];
}

function must<Value>(value: Value | undefined): Value {
  if (value === undefined) throw new Error('there is none');
  return value;
}
