import { type Deployment, type DeploymentId, isTerminal } from '../domain.ts';
import { leftOutMarker } from '../store/logs.ts';
import type { Reads } from '../store/store.ts';
import type { Watch, Watches } from './watches.ts';

/** A silent stream says so now and then: proxies, and our own listener, end connections on which nothing moves. */
const HEARTBEAT_MS = 15_000;

/** How long an EventSource is to wait before it connects again. */
const RECONNECT_AFTER_MS = 1_000;

/** Who follows a log. */
interface LogFollower {
  id: DeploymentId;
  /** The first byte that is wanted. */
  from: number;
  watch: Watch;
  /** Asked before anything is said: a revoked key follows no longer. */
  mayFollow(): boolean;
}

type LogEvents = (follower: LogFollower) => AsyncGenerator<Buffer, void, undefined>;

/**
 * Makes the function that gives a log as server-sent events, until the deployment has ended and all was said. An
 * event's id is the offset to go on at. Ends early when the follower's watch is closed, or it may not follow.
 */
export function createLogEvents(reads: Reads, watches: Watches): LogEvents {
  const sayAt = rememberingUntilCommit(watches, (id, at, midLine) => say(reads, id, at, midLine));

  return async function* ({ id, from, watch, mayFollow }) {
    // Whatever comes first takes the response's head along.
    yield Buffer.from(`retry: ${RECONNECT_AFTER_MS}\n\n`);
    let at = from;
    let midLine = false;
    for (let waitMs = 0; ; ) {
      const woken = await watch.next(waitMs);
      if (woken === 'closed') return;
      if (!mayFollow()) return;
      if (woken === 'timedOut' && waitMs > 0) yield HEARTBEAT;
      const said = sayAt(id, at, midLine);
      if (said.event !== undefined) yield said.event;
      if (said.isOver) return;
      ({ at, midLine } = said);
      waitMs = said.isAll ? HEARTBEAT_MS : 0;
    }
  };
}

const HEARTBEAT = Buffer.from(': still here\n\n');

/** What there is to say at some place of a log, and the place after it. */
interface Said {
  event: Buffer | undefined;
  at: number;
  midLine: boolean;
  /** There is no more before the next commit. */
  isAll: boolean;
  /** There will be no more. */
  isOver: boolean;
}

type SayAt = (id: DeploymentId, at: number, midLine: boolean) => Said;

/** Those who follow a log live are all at the same place: one reads for all of them, and they share the bytes. */
function rememberingUntilCommit(watches: Watches, sayAt: SayAt): SayAt {
  const remembered = new Map<string, Said>();
  let rememberedAt = watches.commits();

  return (id, at, midLine) => {
    if (rememberedAt !== watches.commits() || remembered.size >= REMEMBERED_MAX) remembered.clear();
    rememberedAt = watches.commits();
    const place = `${id} ${at} ${midLine}`;
    const said = remembered.get(place) ?? sayAt(id, at, midLine);
    remembered.set(place, said);
    return said;
  };
}

/** Some may be behind, each at a place of its own. */
const REMEMBERED_MAX = 32;

function say({ deployments, logs }: Reads, id: DeploymentId, at: number, midLine: boolean): Said {
  const deployment = deployments.get(id);
  if (deployment === undefined) return { event: undefined, at, midLine, isAll: true, isOver: true };
  const next = nextText(logs, deployment, at, midLine);
  const hasEnded = isTerminal(deployment.status);
  if (next !== undefined) {
    return {
      event: Buffer.from(`id: ${next.end}\n${dataLines(next.text)}\n`),
      at: next.end,
      midLine: !/[\r\n]$/.test(next.text),
      isAll: next.end === deployment.log_bytes && !hasEnded,
      isOver: false,
    };
  }
  const event = hasEnded
    ? Buffer.from(`id: ${at}\nevent: end\n${dataLines(JSON.stringify({ status: deployment.status }))}\n`)
    : undefined;
  return { event, at, midLine, isAll: true, isOver: hasEnded };
}

/** Whichever line end the text has, a parser makes it a line feed (HTML, 9.2.6). */
function dataLines(text: string): string {
  return text
    .split(/\r\n|\r|\n/)
    .map((line) => `data: ${line}\n`)
    .join('');
}

/**
 * The text at byte `at`, up to `end`; undefined if there is none yet. Never a part of a character or of a line's
 * end, unless what belongs to it will not come.
 */
function nextText(
  logs: Reads['logs'],
  { id, status, log_bytes }: Deployment,
  at: number,
  midLine: boolean,
): { text: string; end: number } | undefined {
  if (at >= log_bytes) return undefined;
  const first = logs.pieceAt(id, at, log_bytes);
  if (first.kind === 'leftOut') {
    return { text: leftOutMarker(first.end - at, midLine || first.midLine), end: first.end };
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

/** How many of the bytes need none of those that follow: all, but for the beginning of a character or of CR LF. */
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

/** Of the character that begins with this byte (RFC 3629, 3). */
function characterLength(first: number): number {
  if (first >= 0xf0) return 4;
  if (first >= 0xe0) return 3;
  return first >= 0xc0 ? 2 : 1;
}
