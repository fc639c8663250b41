import type { Effects } from '../effects.ts';
import { createSlots } from '../slots.ts';
import type { Connect, SocketEvents } from './connect.ts';
import type { Reputation } from './resolver.ts';

/** Where a connection leads. */
export interface Place {
  url: URL;
  /** Of the URL. */
  origin: string;
}

/** One connection to one receiver. It carries one request at a time. */
export interface Connection {
  /** Where it leads; null until it is connected. */
  remoteAddress(): string | null;
  /** Whether it carried a request before, so that the receiver may have closed it meanwhile. */
  readonly reused: boolean;
  /** Sends a request, as soon as it is connected. */
  send(request: string, exchange: Exchange): void;
}

/** Who hears what comes of a request, until it gives the connection back or drops it. */
export interface Exchange {
  /** The bytes are overwritten after. */
  received(bytes: Buffer): void;
  /** No more can come; null: the receiver closed the connection in order. */
  closed(error: Error | null): void;
}

export interface Connections {
  /** One that stands idle, else a new one. */
  take(place: Place, reputation: Reputation): Connection;
  open(place: Place, reputation: Reputation): Connection;
  /** After a whole answer: it may serve again, for `idleMs` if the receiver says how long it waits. */
  giveBack(connection: Connection, idleMs: number | null): void;
  /** Closes it, whatever it does. */
  drop(connection: Connection): void;
  close(): void;
}

/** Common servers close after 5 s without a word; others say in Keep-Alive how long they wait, and are believed up to this. */
const IDLE_MS = 4_000;
const IDLE_HINTED_MAX_MS = 60_000;
/** A request that is sent just when the receiver gives up is lost. */
const IDLE_HINTED_LESS_MS = 1_000;

const LOOK_AT_IDLE_EVERY_MS = 1_000;

/** So that a receiver that moves to another address is found there, however busy the connection is. */
const AGE_MAX_MS = 5 * 60_000;

/** A receiver that answers without reading would have request upon request wait here. */
const WAITING_MAX_BYTES = 64 * 1024;

interface OwnConnection extends Connection {
  readonly origin: string;
  readonly openedAtMs: number;
  reused: boolean;
  exchange: Exchange | undefined;
  idleUntilMs: number;
  /** Among those that are idle; undefined: it is not. */
  place: number | undefined;
  waitingBytes(): number;
  destroy(): void;
}

/**
 * Idle connections wait for the next delivery, `idleMax` over all receivers: with thousands of them the one
 * that was idle for longest makes room.
 */
export function createConnections(connect: Connect, idleMax: number, effects: Effects): Connections {
  // In the order in which they became idle, over all receivers and for each.
  const idle = createSlots<OwnConnection>();
  const idleOfOrigin = new Map<string, OwnConnection[]>(); // none, of a receiver that is busy at the moment
  let looking = false;

  return {
    take,
    open,
    giveBack: (connection, idleMs) => giveBack(connection as OwnConnection, idleMs),
    drop: (connection) => drop(connection as OwnConnection),
    close() {
      for (const connection of idle) drop(connection);
    },
  };

  function take(place: Place, reputation: Reputation): Connection {
    // The one that was used last: the others may then go out of use.
    const connection = idleOfOrigin.get(place.origin)?.at(-1);
    if (connection === undefined) return open(place, reputation);
    if (connection.idleUntilMs <= effects.monotonicMs()) {
      drop(connection);
      return take(place, reputation);
    }
    leaveIdle(connection);
    return connection;
  }

  function open({ url, origin }: Place, reputation: Reputation): Connection {
    let waiting: string | undefined;
    let isConnected = false;
    const hears: SocketEvents = {
      connected() {
        isConnected = true;
        if (waiting !== undefined) socket.write(waiting);
        waiting = undefined;
      },
      received(bytes) {
        // A receiver that says something unasked cannot be understood the next time.
        if (connection.exchange === undefined) drop(connection);
        else connection.exchange.received(bytes);
      },
      closed(error) {
        if (connection.exchange === undefined) drop(connection);
        else connection.exchange.closed(error);
      },
    };
    const socket = connect(url, hears, reputation);
    const connection: OwnConnection = {
      origin,
      openedAtMs: effects.monotonicMs(),
      reused: false,
      exchange: undefined,
      idleUntilMs: 0,
      place: undefined,
      remoteAddress: socket.remoteAddress,
      waitingBytes: socket.waitingBytes,
      destroy: socket.destroy,
      send(request, exchange) {
        connection.exchange = exchange;
        if (isConnected) socket.write(request);
        else waiting = request;
      },
    };
    return connection;
  }

  function giveBack(connection: OwnConnection, hintedMs: number | null): void {
    const nowMs = effects.monotonicMs();
    const idleMs = hintedMs === null ? IDLE_MS : Math.min(hintedMs - IDLE_HINTED_LESS_MS, IDLE_HINTED_MAX_MS);
    const isWorn =
      connection.waitingBytes() > WAITING_MAX_BYTES || nowMs - connection.openedAtMs > AGE_MAX_MS;
    if (isWorn || idleMs <= 0) {
      drop(connection);
      return;
    }
    connection.reused = true;
    connection.exchange = undefined;
    connection.idleUntilMs = nowMs + idleMs;
    connection.place = idle.put(connection);
    const siblings = idleOfOrigin.get(connection.origin);
    if (siblings === undefined) idleOfOrigin.set(connection.origin, [connection]);
    else siblings.push(connection);
    if (idle.size > idleMax) {
      const [longest = connection] = idle;
      drop(longest);
    }
    if (!looking) lookLater();
  }

  function lookLater(): void {
    looking = true;
    effects.after(LOOK_AT_IDLE_EVERY_MS, () => {
      looking = false;
      const nowMs = effects.monotonicMs();
      for (const connection of idle) {
        if (connection.idleUntilMs <= nowMs) drop(connection);
      }
      for (const [origin, siblings] of idleOfOrigin) {
        if (siblings.length === 0) idleOfOrigin.delete(origin);
      }
      if (idle.size > 0) lookLater();
    });
  }

  function drop(connection: OwnConnection): void {
    leaveIdle(connection);
    connection.destroy();
  }

  function leaveIdle(connection: OwnConnection): void {
    if (connection.place === undefined) return;
    idle.take(connection.place);
    connection.place = undefined;
    const siblings = idleOfOrigin.get(connection.origin) ?? [];
    siblings.splice(siblings.lastIndexOf(connection), 1);
  }
}
