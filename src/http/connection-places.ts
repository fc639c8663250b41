import type { IncomingMessage, Server as Listener } from 'node:http';
import type { Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import { createSlots, type Slots } from '../slots.ts';
import { takenBytes } from './send-buffers.ts';
import { acceptedSocket } from './tls-connections.ts';

/** The connections of a listener, of which only so many may have a place, that is, have their requests carried out. */
export interface ConnectionPlaces {
  /** The connection on which a request came. */
  of(socket: Duplex): Connection;
}

export interface Connection {
  /** A request has come, the latest one. */
  begin(request: IncomingMessage): void;
  /** One of its requests had a valid key: its client is no stranger. */
  welcome(): void;
  /** All its requests have been answered, and the answers taken. */
  rest(): void;
  /** False, from then on at every call: every place was taken by a connection with a request under way. */
  takePlace(): boolean;
}

/** Each connection costs a file descriptor and, once idle after its first request, 24 KiB (measured). */
const PLACES_MAX = 4_096;

/**
 * Connections without a place that are accepted beside them, as a fraction: those that have not sent a request yet, and
 * those that are answered 503.
 */
const SPARE_FRACTION = 1 / 16;

const WARN_EVERY_MS = 60_000;

/**
 * Half of the open files that the system allows are reserved for davit's own work: even a cancellation needs one. The
 * other half is for all connections that are accepted, see system-limits.ts.
 */
export function placesFor(openFiles: number): number {
  return Math.min(PLACES_MAX, Math.floor(Math.floor(openFiles / 2) / (1 + SPARE_FRACTION)));
}

/** For so long, the rest of a body may be on its way. */
const BODY_MS = 1_000;
/**
 * For so long from the first request of a connection, a stranger may send bodies and take answers, all of which are
 * small: with a second for each, 340 connections that began another body in time kept everybody out of 329 places.
 */
const STRANGER_MS = 1_000;
/** The kernel takes an answer in steps of up to 0.9 MB, for which a client that reads steadily may need seconds. */
const TAKEN_MS = 10_000;

/** How soon those that may give way are looked for again, after none was found: 4,096 take 0.5 ms. */
const LOOK_AGAIN_MS = 100;

interface OpenConnection extends Connection {
  /** Whether it has a place, and the body of its latest request does not end, or an answer is not taken. */
  mayGiveWay(nowMs: number): boolean;
  close(): void;
}

/**
 * Shares `places` among the connections of `listener`: clients that are idle, silent or stuck keep nobody out. A
 * connection gets its place with its first request. If all are taken, the one that has been idle for the longest time
 * since its last answer is closed, as nginx does with its reusable connections; if none is idle, the one with the
 * oldest request of those that wait for their clients, be it that a body has not ended within `BODY_MS`, nor a stranger
 * sent its bodies and taken its answers within `STRANGER_MS`, or that nothing of an answer was taken for `TAKEN_MS`.
 * Those without a place, because they have not sent the head of a request yet, nor ended their TLS handshake, or are
 * refused, keep none from others: if there are too many, the oldest of them is closed.
 */
export function createConnectionPlaces(
  listener: Listener,
  places: number,
  effects: Effects,
  logger: Logger,
): ConnectionPlaces {
  const acceptedMax = Math.ceil(places * (1 + SPARE_FRACTION));
  const connections = new WeakMap<Duplex, Connection>();
  /** Those without a place, those with requests under way, and those that have been answered. */
  const spare = createSlots<OpenConnection>();
  const underWay = createSlots<OpenConnection>();
  const idle = createSlots<OpenConnection>();
  let accepted = 0;
  let taken = 0;
  let closed = 0;
  let warnedAtMs = Number.NEGATIVE_INFINITY;
  let lookAgainAtMs = Number.NEGATIVE_INFINITY;

  listener.on('connection', (socket: Socket) => {
    connections.set(socket, accept(socket));
    if (accepted > acceptedMax) closeForOthers(oldest(spare)); // at worst, the one that has just come
  });
  // Called on stopping. Node's own would cut off answers that are not taken yet: hapi ends those connections then.
  // Neither knows those whose TLS handshake has not ended.
  listener.closeIdleConnections = () => {
    for (const waiting of [spare, idle]) for (const connection of waiting) connection.close();
  };
  return {
    of(socket) {
      const connection = connections.get(acceptedSocket(socket));
      if (connection === undefined) throw new Error('a request came on a connection that was not accepted');
      return connection;
    },
  };

  function accept(socket: Socket): Connection {
    let isOpen = true;
    let hasPlace = false;
    let isRefused = false;
    let isStranger = true;
    let latest: IncomingMessage | undefined;
    let latestAtMs = 0;
    let firstAtMs = Number.POSITIVE_INFINITY;
    let takenAtLook: number | undefined;
    let takenSinceMs = 0;
    const connection: OpenConnection = {
      begin(request) {
        latest = request;
        latestAtMs = effects.monotonicMs();
        firstAtMs = Math.min(firstAtMs, latestAtMs);
        if (list !== underWay && !isRefused && isOpen) moveTo(underWay);
      },
      welcome() {
        isStranger = false;
      },
      rest() {
        latest = undefined;
        if (isOpen && hasPlace) moveTo(idle);
      },
      takePlace() {
        if (hasPlace || !isOpen) return true;
        if (isRefused) return false;
        if (taken === places) closeForOthers(oldest(idle) ?? oldestThatMayGiveWay());
        isRefused = taken === places;
        hasPlace = !isRefused;
        if (hasPlace) taken += 1;
        else moveTo(spare);
        return hasPlace;
      },
      mayGiveWay(nowMs) {
        if (!hasPlace || latest === undefined) return false;
        const isSending = latest.socket.writableLength > 0;
        if (isStranger && (isSending || !latest.complete)) return nowMs - firstAtMs >= STRANGER_MS;
        if (!latest.complete) return nowMs - latestAtMs >= BODY_MS;
        const bytes = isSending ? takenBytes(socket) : undefined;
        if (bytes !== undefined && bytes === takenAtLook) return nowMs - takenSinceMs >= TAKEN_MS;
        takenAtLook = bytes;
        takenSinceMs = nowMs;
        return false;
      },
      close() {
        leave();
        socket.destroy();
      },
    };
    let list = spare;
    let slot = list.put(connection);
    accepted += 1;
    socket.once('close', leave);
    return connection;

    function moveTo(next: Slots<OpenConnection>): void {
      list.take(slot);
      list = next;
      slot = list.put(connection);
    }
    function leave(): void {
      if (!isOpen) return;
      isOpen = false;
      list.take(slot);
      accepted -= 1;
      if (hasPlace) taken -= 1;
    }
  }

  function oldestThatMayGiveWay(): OpenConnection | undefined {
    const nowMs = effects.monotonicMs();
    if (nowMs < lookAgainAtMs) return undefined;
    for (const connection of underWay) if (connection.mayGiveWay(nowMs)) return connection;
    lookAgainAtMs = nowMs + LOOK_AGAIN_MS;
    return undefined;
  }

  function closeForOthers(connection: OpenConnection | undefined): void {
    if (connection === undefined) return;
    connection.close();
    tellOfClosed();
  }

  /** At most once a minute, with how many there were since the last time. */
  function tellOfClosed(): void {
    closed += 1;
    if (closed > 1) return;
    effects.after(Math.max(0, warnedAtMs + WARN_EVERY_MS - effects.monotonicMs()), () => {
      warnedAtMs = effects.monotonicMs();
      logger.warn(
        { closed },
        'connections were closed for others: there were too many that waited for their clients',
      );
      closed = 0;
    });
  }
}

function oldest(connections: Slots<OpenConnection>): OpenConnection | undefined {
  const [connection] = connections;
  return connection;
}
