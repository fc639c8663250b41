import { type Deployment, type DeploymentId, isTerminal, type TerminalStatus } from '../domain.ts';
import { delay, type Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import {
  type ApiAnswer,
  type ApiClient,
  type ApiRefusal,
  isDropped,
  type Patience,
  parsed,
} from './api-client.ts';
import type { LogOutput } from './deployment-logs.ts';
import { readEvents, type ServerEvent } from './event-stream.ts';

export type Outcome =
  | { kind: 'ended'; status: TerminalStatus; deployment: Deployment | null }
  | { kind: 'refused'; refusal: ApiRefusal };

/**
 * Writes the log of a deployment until it has ended, over as many connections as that takes, every byte once.
 * `mayWrite` is awaited before each piece. `deployment` is null in what it gives if the key may only read logs.
 */
export async function followLog(
  id: DeploymentId,
  api: ApiClient,
  output: Pick<LogOutput, 'write'>,
  mayWrite: () => Promise<void>,
): Promise<Outcome> {
  const patience = api.patience();
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
      for await (const event of readEvents(heard(answer.body, patience))) {
        patience.reset();
        // It becomes a header, which not every text can stand in.
        if (/^\d+$/.test(event.lastEventId)) lastEventId = event.lastEventId;
        const status = endIn(event);
        if (status !== undefined) return await ended(id, api, status);
        if (event.type !== 'message' || !isRead) continue;
        await mayWrite();
        isRead = await output.write(Buffer.from(event.data));
      }
    } catch (error) {
      if (!isDropped(error)) throw error;
    }
    await patience.wait('the connection ended before the deployment did');
  }
}

/**
 * The bytes as they come. A heartbeat resets `patience` as an event does: a silent log over connections that a proxy cuts
 * every few minutes is followed to its end. What every connection begins with does not.
 */
async function* heard(
  bytes: AsyncIterable<Uint8Array>,
  patience: Patience,
): AsyncGenerator<Uint8Array, void, undefined> {
  let isGreeting = true;
  for await (const piece of bytes) {
    if (!isGreeting) patience.reset();
    isGreeting = false;
    yield piece;
  }
}

/** At most: one may answer before there is an end, or with a status that only a later davit knows. */
const ASK_EVERY_MS = 1_000;

/** Waits for the end of a deployment without its log. */
export async function awaitEnd(id: DeploymentId, api: ApiClient, effects: Effects): Promise<Outcome> {
  for (;;) {
    const askedAtMs = effects.monotonicMs();
    const answer = await deploymentOf(id, api, '?wait=60');
    if (!answer.ok) return { kind: 'refused', refusal: answer };
    const { body } = answer;
    if (isTerminal(body.status)) return { kind: 'ended', status: body.status, deployment: body };
    const leftMs = askedAtMs + ASK_EVERY_MS - effects.monotonicMs();
    if (leftMs > 0) await delay(leftMs, effects);
  }
}

/** Undefined for an event that tells of none. */
function endIn({ type, data }: ServerEvent): TerminalStatus | undefined {
  if (type !== 'end') return undefined;
  const { status } = Object(parsed(data)) as Pick<Deployment, 'status'>;
  return isTerminal(status) ? status : undefined;
}

/** How it ended is said already: a service that is away by now, as one that was just deployed itself, only says no more of it. */
async function ended(id: DeploymentId, api: ApiClient, status: TerminalStatus): Promise<Outcome> {
  const answer = await deploymentOf(id, api, '').catch((error) => {
    if (error instanceof AppError && error.code === 'unavailable') return undefined;
    throw error;
  });
  return { kind: 'ended', status, deployment: answer?.ok === true ? answer.body : null };
}

function deploymentOf(id: DeploymentId, api: ApiClient, query: string): Promise<ApiAnswer<Deployment>> {
  return api.call({ method: 'GET', path: `/v2/deployments/${id}${query}` });
}
