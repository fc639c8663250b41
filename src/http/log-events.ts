import { setImmediate as nextTurn } from 'node:timers/promises';
import { type DeploymentId, isTerminal } from '../domain.ts';
import type { Effects } from '../effects.ts';
import type { DeploymentProgress } from '../store/deployments.ts';
import { leftOutMarker } from '../store/logs.ts';
import type { Reads } from '../store/store.ts';
import type { Watch } from './watches.ts';

/** Sent when there is no output: proxies, and davit's own listener, close idle connections. */
const HEARTBEAT_MS = 15_000;

/** How long an EventSource waits before it reconnects. */
const RECONNECT_AFTER_MS = 1_000;

/** A client that follows a log. */
interface LogFollower {
  id: DeploymentId;
  /** The offset of the first byte to send. */
  from: number;
  /** Woken by commits that concern the log. */
  watch: Watch;
  /** Asked before each event: a revoked key must not go on following. */
  mayFollow(): boolean;
}

type LogEvents = (follower: LogFollower) => AsyncGenerator<Buffer, void, undefined>;

/**
 * Creates the function that streams a log as server-sent events, until the deployment has ended and everything was sent.
 * The id of an event is the offset after it. The stream ends early if it may not go on, or has to wait once its watch is
 * closed.
 */
export function createLogEvents(reads: Reads, effects: Pick<Effects, 'monotonicMs'>): LogEvents {
  // Clients that follow a log live are all at the same offset: the first read serves all of them, with the same bytes.
  const cached = reads.cache<NextEvent>();

  return async function* ({ id, from, watch, mayFollow }) {
    // Sent at once, as the response's head goes out with the first chunk. With an id, so that a client that loses the
    // connection before the first event continues here, and not where `tail` would lead it then.
    yield Buffer.from(`retry: ${RECONNECT_AFTER_MS}\nid: ${from}\n\n`);
    let at = from;
    let midLine = false;
    let isAll = false;
    // A moment, not a wait: commits that bring no output must not put it off.
    let heartbeatAtMs = effects.monotonicMs() + HEARTBEAT_MS;
    for (;;) {
      const woken = await watch.next(isAll ? heartbeatAtMs - effects.monotonicMs() : 0);
      if (woken === 'closed' && isAll) return;
      if (!mayFollow()) return;
      const next = cached(`${id} ${at} ${midLine}`, () => nextEvent(reads, id, at, midLine));
      const isQuiet = effects.monotonicMs() >= heartbeatAtMs;
      const sent = next.event ?? (isQuiet ? HEARTBEAT : undefined);
      if (sent !== undefined) {
        yield sent;
        heartbeatAtMs = effects.monotonicMs() + HEARTBEAT_MS;
      }
      if (next.isOver) return;
      ({ at, midLine, isAll } = next);
      await nextTurn(); // as in a log that is read as text
    }
  };
}

const HEARTBEAT = Buffer.from(': still here\n\n');

/** The event for an offset of a log, if there is one yet, and where the log continues. */
interface NextEvent {
  event: Buffer | undefined;
  /** The offset after the event. */
  at: number;
  /** Whether that is within a line. */
  midLine: boolean;
  /** There is nothing more until the next commit. */
  isAll: boolean;
  /** This was the last event. */
  isOver: boolean;
}

function nextEvent({ deployments, logs }: Reads, id: DeploymentId, at: number, midLine: boolean): NextEvent {
  const deployment = deployments.progress(id);
  if (deployment === undefined) return { event: undefined, at, midLine, isAll: true, isOver: true };
  const next = nextText(logs, deployment, at, midLine);
  const hasEnded = isTerminal(deployment.status);
  if (next !== undefined) {
    return {
      event: Buffer.from(`id: ${next.end}\n${dataLines(next.text)}\n`),
      at: next.end,
      midLine: endsMidLine(next.text),
      isAll: next.end === deployment.log_bytes && !hasEnded,
      isOver: false,
    };
  }
  const event = hasEnded
    ? Buffer.from(`id: ${at}\nevent: end\n${dataLines(JSON.stringify({ status: deployment.status }))}\n`)
    : undefined;
  return { event, at, midLine, isAll: true, isOver: hasEnded };
}

/** Clients turn every kind of line end in an event stream into a line feed (HTML, 9.2.6). */
function dataLines(text: string): string {
  return text
    .split(/\r\n|\r|\n/)
    .map((line) => `data: ${line}\n`)
    .join('');
}

/** For the client, a CR ends a line too: see `dataLines`. */
function endsMidLine(text: string): boolean {
  return /[^\r\n]$/.test(text);
}

/**
 * The text from byte `at` to `end`; undefined if there is none yet. Never splits a character or a CR LF, unless the rest
 * of it will never come.
 */
function nextText(
  logs: Reads['logs'],
  { id, status, log_bytes }: DeploymentProgress,
  at: number,
  midLine: boolean,
): { text: string; end: number } | undefined {
  if (at >= log_bytes) return undefined;
  const first = logs.pieceAt(id, at, log_bytes);
  if (first.kind === 'leftOut') {
    const isMidLine = midLine || endsMidLine(Buffer.from(first.before).toString('latin1'));
    return { text: leftOutMarker(first.end - at, isMidLine), end: first.end };
  }
  let { bytes } = first;
  let wholeBytes = wholeLength(bytes);
  while (wholeBytes === 0) {
    const end = at + bytes.length;
    if (end === log_bytes && !isTerminal(status)) return undefined;
    const more = end === log_bytes ? undefined : logs.pieceAt(id, end, log_bytes);
    if (more?.kind === 'bytes') {
      bytes = Buffer.concat([bytes, more.bytes]);
      wholeBytes = wholeLength(bytes);
    } else {
      wholeBytes = bytes.length;
    }
  }
  return { text: bytes.toString('utf8', 0, wholeBytes), end: at + wholeBytes };
}

const CARRIAGE_RETURN = 0x0d;

/** How many bytes there are before an incomplete character, or a CR that an LF may follow, at the end. */
function wholeLength(bytes: Buffer): number {
  if (bytes.at(-1) === CARRIAGE_RETURN) return bytes.length - 1;
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back] ?? 0;
    if (!isContinuation(byte)) return characterLength(byte) > back ? bytes.length - back : bytes.length;
  }
  return bytes.length;
}

function isContinuation(byte: number): boolean {
  return (byte & 0xc0) === 0x80;
}

/** The length of the character that begins with this byte (RFC 3629, 3). */
function characterLength(first: number): number {
  if (first >= 0xf0) return 4;
  if (first >= 0xe0) return 3;
  return first >= 0xc0 ? 2 : 1;
}
