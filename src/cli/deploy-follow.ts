import { type Deployment, type DeploymentId, isTerminal, type TerminalStatus } from '../domain.ts';
import { delay, type Effects } from '../effects.ts';
import { type ApiAnswer, type ApiClient, type ApiRefusal, parsed } from './api-client.ts';
import { isDropped, isGarbled } from './connections.ts';
import type { LogOutput } from './deployment-logs.ts';
import { readEvents, type ServerEvent } from './event-stream.ts';
import { GaveUp, type Patience } from './patience.ts';

export type Outcome =
  | { kind: 'ended'; status: TerminalStatus; deployment: Deployment | null }
  | { kind: 'refused'; refusal: ApiRefusal };

/** Is told once of a deployment that is still queued after some time. */
type OnQueued = (deployment: Deployment) => Promise<void>;

/**
 * Writes the log of a deployment until it has ended, over as many connections as that takes, every byte once.
 * `mayWrite` is awaited before each piece. In the outcome `deployment` is null if it cannot be read, as with a key that
 * may only read logs.
 */
export async function followLog(
  id: DeploymentId,
  api: ApiClient,
  output: Pick<LogOutput, 'write'>,
  mayWrite: () => Promise<void>,
  onQueued: OnQueued,
): Promise<Outcome> {
  const patience = api.patience();
  let mayBeQueued = true;
  const lookWhileSilent = async () => {
    if (!mayBeQueued) return;
    mayBeQueued = false;
    const looked = await deploymentOf(id, api, '');
    if (looked.ok && looked.body.status === 'queued') await onQueued(looked.body);
  };
  let lastEventId = '0';
  let isRead = true;
  for (;;) {
    const answer = await api.stream({
      method: 'GET',
      path: `/v2/deployments/${id}/logs`,
      headers: { Accept: 'text/event-stream', 'Last-Event-ID': lastEventId },
    });
    if (!answer.ok) return { kind: 'refused', refusal: answer };
    try {
      for await (const event of readEvents(attended(answer.body, patience, lookWhileSilent))) {
        mayBeQueued = false;
        patience.reset();
        // It is sent back in a header, which not every text may be.
        if (/^\d+$/.test(event.lastEventId)) lastEventId = event.lastEventId;
        const status = endIn(event);
        if (status !== undefined) return await ended(id, api, status);
        if (event.type !== 'message' || !isRead) continue;
        await mayWrite();
        isRead = await output.write(Buffer.from(event.data));
      }
    } catch (error) {
      if (!isDropped(error) && !isGarbled(error)) throw error;
    }
    await patience.wait('the connection ended before the deployment did');
  }
}

/** A comment, and nothing else. */
const HEARTBEAT = /^:[^\n]*\n\n$/;

/**
 * Passes the bytes on. Heartbeats reset `patience` too, so that a silent log is followed to its end even if a proxy
 * cuts the connection every few minutes. The greeting with which every connection begins does not. `onHeartbeat` is
 * awaited at each heartbeat that comes alone.
 */
async function* attended(
  bytes: AsyncIterable<Uint8Array>,
  patience: Patience,
  onHeartbeat: () => Promise<void>,
): AsyncGenerator<Uint8Array, void, undefined> {
  let isGreeting = true;
  for await (const piece of bytes) {
    if (!isGreeting) patience.reset();
    isGreeting = false;
    if (HEARTBEAT.test(Buffer.from(piece).toString('latin1'))) await onHeartbeat();
    yield piece;
  }
}

/** The service may answer before the deployment has ended, or with a status that only a later davit knows. */
const ASK_EVERY_MS = 1_000;

/** Of the 60 that the service allows: gateways give up a request after 30 s or more, mostly. */
const WAIT_SECONDS = 20;

/** Waits for the end of a deployment without its log. */
export async function awaitEnd(
  id: DeploymentId,
  api: ApiClient,
  effects: Effects,
  onQueued: OnQueued,
): Promise<Outcome> {
  for (let isFirst = true; ; isFirst = false) {
    const askedAtMs = effects.monotonicMs();
    const answer = await deploymentOf(id, api, `?wait=${WAIT_SECONDS}`);
    if (!answer.ok) return { kind: 'refused', refusal: answer };
    const { body } = answer;
    if (isTerminal(body.status)) return { kind: 'ended', status: body.status, deployment: body };
    if (isFirst && body.status === 'queued') await onQueued(body);
    const leftMs = askedAtMs + ASK_EVERY_MS - effects.monotonicMs();
    if (leftMs > 0) await delay(leftMs, effects);
  }
}

/** The status in an `end` event; undefined for other events. */
function endIn({ type, data }: ServerEvent): TerminalStatus | undefined {
  if (type !== 'end') return undefined;
  const { status } = Object(parsed(data)) as Pick<Deployment, 'status'>;
  return isTerminal(status) ? status : undefined;
}

/**
 * Adds the deployment to the status, which is known already. A service that is away by now, as it just deployed itself,
 * adds none.
 */
async function ended(id: DeploymentId, api: ApiClient, status: TerminalStatus): Promise<Outcome> {
  const answer = await deploymentOf(id, api, '').catch((error) => {
    if (error instanceof GaveUp) return undefined;
    throw error;
  });
  return { kind: 'ended', status, deployment: answer?.ok === true ? answer.body : null };
}

function deploymentOf(id: DeploymentId, api: ApiClient, query: string): Promise<ApiAnswer<Deployment>> {
  return api.call({ method: 'GET', path: `/v2/deployments/${id}${query}` });
}
