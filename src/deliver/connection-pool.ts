import type { Effects } from '../effects.ts';
import { createSlots } from '../slots.ts';
import type { Connect, SocketEvents } from './connect.ts';
import type { Owner } from './key-shares.ts';

export interface Destination {
  url: URL;
  /** The URL's, by which idle connections are found. */
  origin: string;
}

/** One connection to one receiver. It carries one request at a time. */
export interface Connection {
  /** The one that was tried last, and to which it is connected; null until one was tried. */
  remoteAddress(): string | null;
  /** Whether it carried a request before: if so, the receiver may have closed it while it was idle. */
  readonly reused: boolean;
  /** Sends the request of the exchange as soon as the connection is established. */
  send(exchange: Exchange): void;
}

/** Receives the answer to a request, until the connection is released or dropped. */
export interface Exchange {
  /**
   * Called once, when the request can be sent: with `isLate`, not before `send` has returned, as the connection was not
   * established yet. Null: none is sent, the exchange has ended.
   */
  request(isLate: boolean): string | null;
  /** `bytes` is valid only during the call. */
  received(bytes: Buffer): void;
  /** No more can arrive. Null: the receiver closed the connection without an error. */
  closed(error: Error | null): void;
}

interface ConnectionPool {
  /** An idle connection, or else a new one. */
  acquire(destination: Destination, key: Owner): Connection;
  /** A new connection. */
  open(destination: Destination, key: Owner): Connection;
  /** Call after a whole answer: the connection may be reused, within `idleMs` if the receiver announced a timeout. */
  release(connection: Connection, idleMs: number | null): void;
  /** Closes a connection, whatever its state. */
  drop(connection: Connection): void;
  close(): void;
}

/** Common servers close an idle connection after 5 s without announcing it. */
const IDLE_MS = 4_000;
/**
 * The upper bound for a timeout that the receiver announces in Keep-Alive. By default, the retry of an attempt that got
 * no answer comes 15 s after its beginning, so that it opens a new connection: if its host vanishes, or a router on the
 * way forgets them, a receiver's connections are lost together, and each retry would go over another one of them.
 */
const IDLE_HINTED_MAX_MS = 10_000;
/** How much earlier to stop reusing it: a request that is sent just when the receiver closes is lost. */
const IDLE_HINTED_LESS_MS = 1_000;

const SWEEP_EVERY_MS = 1_000;

/** So that a receiver that moves to another address is found there, even if its connection is never idle. */
const AGE_MAX_MS = 5 * 60_000;

/** Not reused beyond this: a receiver that answers without reading would let request upon request pile up here. */
const UNSENT_MAX_BYTES = 64 * 1024;

interface OwnConnection extends Connection {
  readonly origin: string;
  readonly openedAtMs: number;
  reused: boolean;
  exchange: Exchange | undefined;
  idleUntilMs: number;
  /** Its place in `idle`; undefined: it is not idle. */
  idlePlace: number | undefined;
  unsentBytes(): number;
  destroy(): void;
}

/**
 * Keeps idle connections for the next delivery, at most `idleMax` over all receivers: beyond that, the one that was idle
 * for longest is closed.
 */
export function createConnectionPool(connect: Connect, idleMax: number, effects: Effects): ConnectionPool {
  // Both in the order in which connections became idle.
  const idle = createSlots<OwnConnection>();
  const idleOfOrigin = new Map<string, OwnConnection[]>(); // lists may be empty: the next sweep removes those
  let isSweepScheduled = false;

  return {
    acquire,
    open,
    release: (connection, idleMs) => release(connection as OwnConnection, idleMs),
    drop: (connection) => drop(connection as OwnConnection),
    close() {
      for (const connection of idle) drop(connection);
    },
  };

  function acquire(destination: Destination, key: Owner): Connection {
    // The one that was used last, so that surplus ones become idle for long and are closed.
    const connection = idleOfOrigin.get(destination.origin)?.at(-1);
    if (connection === undefined) return open(destination, key);
    if (connection.idleUntilMs <= effects.monotonicMs()) {
      drop(connection);
      return acquire(destination, key);
    }
    leaveIdle(connection);
    return connection;
  }

  function open({ url, origin }: Destination, key: Owner): Connection {
    let isConnected = false;
    const events: SocketEvents = {
      connected() {
        isConnected = true;
        write(true);
      },
      received(bytes) {
        // Unsolicited data could be taken for the beginning of the next answer.
        if (connection.exchange === undefined) drop(connection);
        else connection.exchange.received(bytes);
      },
      closed(error) {
        if (connection.exchange === undefined) drop(connection);
        else connection.exchange.closed(error);
      },
    };
    const socket = connect(url, events, key);
    const connection: OwnConnection = {
      origin,
      openedAtMs: effects.monotonicMs(),
      reused: false,
      exchange: undefined,
      idleUntilMs: 0,
      idlePlace: undefined,
      remoteAddress: socket.remoteAddress,
      unsentBytes: socket.unsentBytes,
      destroy: socket.destroy,
      send(exchange) {
        connection.exchange = exchange;
        if (isConnected) write(false);
      },
    };
    return connection;

    function write(isLate: boolean): void {
      const request = connection.exchange?.request(isLate) ?? null;
      if (request !== null) socket.write(request);
    }
  }

  function release(connection: OwnConnection, hintedMs: number | null): void {
    const nowMs = effects.monotonicMs();
    const idleMs = hintedMs === null ? IDLE_MS : Math.min(hintedMs - IDLE_HINTED_LESS_MS, IDLE_HINTED_MAX_MS);
    const isWornOut =
      connection.unsentBytes() > UNSENT_MAX_BYTES || nowMs - connection.openedAtMs > AGE_MAX_MS;
    if (isWornOut || idleMs <= 0) {
      drop(connection);
      return;
    }
    connection.reused = true;
    connection.exchange = undefined;
    connection.idleUntilMs = nowMs + idleMs;
    connection.idlePlace = idle.put(connection);
    const siblings = idleOfOrigin.get(connection.origin);
    if (siblings === undefined) idleOfOrigin.set(connection.origin, [connection]);
    else siblings.push(connection);
    if (idle.size > idleMax) {
      const [oldest = connection] = idle;
      drop(oldest);
    }
    if (!isSweepScheduled) scheduleSweep();
  }

  function scheduleSweep(): void {
    isSweepScheduled = true;
    effects.after(SWEEP_EVERY_MS, () => {
      isSweepScheduled = false;
      const nowMs = effects.monotonicMs();
      for (const connection of idle) {
        if (connection.idleUntilMs <= nowMs) drop(connection);
      }
      for (const [origin, siblings] of idleOfOrigin) {
        if (siblings.length === 0) idleOfOrigin.delete(origin);
      }
      if (idle.size > 0) scheduleSweep();
    });
  }

  function drop(connection: OwnConnection): void {
    leaveIdle(connection);
    connection.destroy();
  }

  function leaveIdle(connection: OwnConnection): void {
    if (connection.idlePlace === undefined) return;
    idle.take(connection.idlePlace);
    connection.idlePlace = undefined;
    const siblings = idleOfOrigin.get(connection.origin) ?? [];
    siblings.splice(siblings.lastIndexOf(connection), 1);
  }
}
