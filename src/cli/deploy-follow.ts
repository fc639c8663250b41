import { type Deployment, type DeploymentId, isTerminal, type TerminalStatus } from '../domain.ts';
import { delay, type Effects } from '../effects.ts';
import { type ApiRefusal, parsed } from './api-answers.ts';
import type { ApiClient } from './api-client.ts';
import { isDropped, isGarbled, isSilence } from './connections.ts';
import { obstacleOf } from './deployment-status.ts';
import { readEvents, type ServerEvent } from './event-stream.ts';
import type { LogOutput } from './log-output.ts';
import type { Patience } from './patience.ts';

export type Outcome =
  | { kind: 'ended'; status: TerminalStatus; deployment: Deployment | null }
  | { kind: 'refused'; refusal: ApiRefusal };

/**
 * Writes the log of a deployment until it has ended, over as many connections as that takes, every byte once.
 * `mayWrite` is awaited before each piece. `note` is told why the deployment stays queued, if that is known. `onEnd` is
 * told the status before the rest is asked for. In the outcome `deployment` is null if it cannot be read, as with a key
 * that may only read logs, or of a service that is away by now, as it just deployed itself.
 */
export async function followLog(
  id: DeploymentId,
  api: ApiClient,
  output: Pick<LogOutput, 'write'>,
  mayWrite: () => Promise<void>,
  note: (text: string) => void,
  onEnd: (status: TerminalStatus) => void,
): Promise<Outcome> {
  const patience = api.patience();
  let isSilent = true;
  let isLookedAt = false;
  const lookWhileSilent = async () => {
    if (!isSilent || isLookedAt) return;
    isLookedAt = true;
    const obstacle = await obstacleTo(await api.deployment(id), api);
    // It may have begun meanwhile.
    if (obstacle !== undefined && isSilent) note(obstacle);
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
    let why = 'the connection ended before the deployment did';
    try {
      for await (const event of readEvents(attended(answer.body, patience, () => void lookWhileSilent()))) {
        isSilent = false;
        patience.reset();
        // It is sent back in a header, which not every text may be.
        if (/^\d+$/.test(event.lastEventId)) lastEventId = event.lastEventId;
        const status = endIn(event);
        if (status !== undefined) {
          onEnd(status);
          // The service may be busy, and why it ended is the first thing to look for.
          return { kind: 'ended', status, deployment: (await api.deployment(id, 'repeatedly')) ?? null };
        }
        if (event.type !== 'message' || !isRead) continue;
        await mayWrite();
        isRead = await output.write(Buffer.from(event.data));
      }
    } catch (error) {
      if (!isDropped(error) && !isGarbled(error)) throw error;
      if (isSilence(error)) why = 'not even a heartbeat comes any more';
    }
    await patience.wait(why);
  }
}

/** A comment, and nothing else. */
const HEARTBEAT = /^:[^\n]*\n\n$/;

/**
 * Passes the bytes on. Heartbeats reset `patience` too, so that a silent log is followed to its end even if a proxy
 * cuts the connection every few minutes. The greeting with which every connection begins does not. `onHeartbeat` is
 * called at each heartbeat that comes alone.
 */
async function* attended(
  bytes: AsyncIterable<Uint8Array>,
  patience: Patience,
  onHeartbeat: () => void,
): AsyncGenerator<Uint8Array, void, undefined> {
  let isGreeting = true;
  for await (const piece of bytes) {
    if (!isGreeting) patience.reset();
    isGreeting = false;
    if (HEARTBEAT.test(Buffer.from(piece).toString('latin1'))) onHeartbeat();
    yield piece;
  }
}

/** The service may answer before the deployment has ended, or with a status that only a later davit knows. */
const ASK_EVERY_MS = 1_000;

/** Of the 60 that the service allows: gateways give up a request after 30 s or more, mostly. */
const WAIT_SECONDS = 20;

/** Waits for the end of a deployment without its log. `note` is as for `followLog`. */
export async function awaitEnd(
  id: DeploymentId,
  api: ApiClient,
  effects: Effects,
  note: (text: string) => void,
): Promise<Outcome> {
  for (let isFirst = true; ; isFirst = false) {
    const askedAtMs = effects.monotonicMs();
    const answer = await api.call({
      method: 'GET',
      path: `/v2/deployments/${id}?wait=${WAIT_SECONDS}`,
      delayMs: WAIT_SECONDS * 1_000,
    });
    if (!answer.ok) return { kind: 'refused', refusal: answer };
    const { body } = answer;
    if (isTerminal(body.status)) return { kind: 'ended', status: body.status, deployment: body };
    const obstacle = isFirst ? await obstacleTo(body, api) : undefined;
    if (obstacle !== undefined) note(obstacle);
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

/** Why a deployment stays queued. That its project is paused, only if the key may read projects. */
async function obstacleTo(
  deployment: Deployment | null | undefined,
  api: ApiClient,
): Promise<string | undefined> {
  if (deployment?.status !== 'queued') return undefined;
  const project = await api.project(deployment.project_id);
  return obstacleOf(deployment, { status: project?.status ?? 'active' }, true);
}
