import type { Server as Listener } from 'node:http';
import type { Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import type { Effects } from '../effects.ts';
import type { Logger } from '../logger.ts';
import { createSlots, type Slots } from '../slots.ts';

/** The connections of a listener, of which only so many may have a place, that is, have their requests carried out. */
export interface ConnectionPlaces {
  /** The connection on which a request came. */
  of(socket: Duplex): Connection;
}

export interface Connection {
  /** A request has come: from now on, this connection is not closed for another one. */
  begin(): void;
  /** All its requests have been answered: it waits for its client. */
  rest(): void;
  /** False: every place is taken by a connection with a request under way. */
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

/**
 * Shares `places` among the connections of `listener`: clients that are idle or silent keep nobody out. A connection gets
 * its place with its first request. If all are taken, the one that has been idle for the longest time since its last
 * answer is closed, as nginx does with its reusable connections. Those that have not sent the head of a request yet,
 * nor ended their TLS handshake, take no place from others: if there are too many, the oldest of them is closed. None is
 * closed while a request is under way: clients that do not end a body, or do not read their answers, keep their places
 * until `requestMs` or `idleMs` is over, see server.ts.
 */
export function createConnectionPlaces(
  listener: Listener,
  places: number,
  effects: Effects,
  logger: Logger,
): ConnectionPlaces {
  const acceptedMax = Math.ceil(places * (1 + SPARE_FRACTION));
  const connections = new WeakMap<Duplex, Connection>();
  /** Those that wait for their clients, before their first request and after: each closes one of them. */
  const silent = createSlots<() => void>();
  const idle = createSlots<() => void>();
  let accepted = 0;
  let taken = 0;
  let closed = 0;
  let warnedAtMs = Number.NEGATIVE_INFINITY;

  listener.on('connection', (socket: Socket) => {
    connections.set(socket, accept(socket));
    if (accepted > acceptedMax) closeOldest(silent); // at worst, the one that has just come
  });
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
    let waiting: Slots<() => void> | undefined = silent;
    let slot = silent.put(close);
    accepted += 1;
    socket.once('close', leave);
    return {
      begin: stopWaiting,
      rest() {
        if (!isOpen || !hasPlace) return;
        waiting = idle;
        slot = idle.put(close);
      },
      takePlace() {
        if (hasPlace || !isOpen) return true;
        if (taken === places) closeOldest(idle);
        if (taken === places) return false;
        taken += 1;
        hasPlace = true;
        return true;
      },
    };

    function stopWaiting(): void {
      waiting?.take(slot);
      waiting = undefined;
    }
    function leave(): void {
      if (!isOpen) return;
      isOpen = false;
      stopWaiting();
      accepted -= 1;
      if (hasPlace) taken -= 1;
    }
    function close(): void {
      leave();
      socket.destroy();
      tellOfClosed();
    }
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

function closeOldest(waiting: Slots<() => void>): void {
  const [close] = waiting;
  close?.();
}

/** Over TLS, requests come on a socket of their own. `_parent`, an internal of Node, is the one that was accepted. */
function acceptedSocket(socket: Duplex): Duplex {
  return (socket as unknown as { _parent?: Duplex | null })._parent ?? socket;
}
