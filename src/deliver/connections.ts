import type { Socket } from 'node:net';
import { Client } from 'undici';
import type { Effects } from '../effects.ts';
import type { Connect } from './connect.ts';

/** One connection to one receiver. It carries one request at a time. */
export interface Connection {
  readonly client: Client;
  readonly origin: string;
  /** Undefined until there is one. */
  socket: Socket | undefined;
  /** Where it leads; null until it is connected. */
  remoteAddress: string | null;
  /** Whether it carried a request before, so that the receiver may have closed it meanwhile. */
  reused: boolean;
  openedAtMs: number;
}

export interface Connections {
  /** One that stands idle, else a new one. */
  take(origin: string): Connection;
  open(origin: string): Connection;
  /** After a whole answer: it may serve again. */
  giveBack(connection: Connection): void;
  /** Closes it, whatever it does. */
  drop(connection: Connection): void;
  /** Resolves when all are closed. */
  close(): Promise<void>;
}

/** Common servers close after 5 s without a word; others say in Keep-Alive how long they wait, and are believed up to this. */
const IDLE_MS = 4_000;
const IDLE_HINTED_MAX_MS = 60_000;

/** So that a receiver that moves to another address is found there, however busy the connection is. */
const AGE_MAX_MS = 5 * 60_000;

/**
 * Idle connections wait for the next delivery, `idleMax` over all receivers: with thousands of them the one
 * that was idle for longest makes room.
 */
export function createConnections(connect: Connect, idleMax: number, effects: Effects): Connections {
  const all = new Set<Connection>();
  // In the order in which they became idle, over all receivers and for each.
  const idle = new Set<Connection>();
  const idleOfOrigin = new Map<string, Connection[]>();

  return { take, open, giveBack, drop, close };

  function take(origin: string): Connection {
    // The one that was used last: the others may then go out of use.
    const connection = idleOfOrigin.get(origin)?.at(-1);
    if (connection === undefined) return open(origin);
    leaveIdle(connection);
    if (connection.socket?.destroyed !== false) {
      drop(connection);
      return take(origin);
    }
    connection.reused = true;
    return connection;
  }

  function open(origin: string): Connection {
    const client = new Client(origin, {
      allowH2: false,
      pipelining: 1,
      keepAliveTimeout: IDLE_MS,
      keepAliveMaxTimeout: IDLE_HINTED_MAX_MS,
      // One deadline stands over the whole attempt; these would only come in its way.
      headersTimeout: 0,
      bodyTimeout: 0,
      connect(target, callback) {
        const socket = connect(target, callback);
        // Also when the client replaces a connection that closed before the request was written.
        connection.socket = socket;
        connection.remoteAddress = null;
        connection.reused = false;
        connection.openedAtMs = effects.monotonicMs();
        socket?.once('connect', () => {
          connection.remoteAddress = socket.remoteAddress ?? null;
        });
      },
    });
    const connection: Connection = {
      client,
      origin,
      socket: undefined,
      remoteAddress: null,
      reused: false,
      openedAtMs: effects.monotonicMs(),
    };
    client.on('disconnect', () => {
      if (idle.has(connection)) drop(connection);
    });
    all.add(connection);
    return connection;
  }

  function giveBack(connection: Connection): void {
    if (effects.monotonicMs() - connection.openedAtMs > AGE_MAX_MS) {
      drop(connection);
      return;
    }
    idle.add(connection);
    const siblings = idleOfOrigin.get(connection.origin);
    if (siblings === undefined) idleOfOrigin.set(connection.origin, [connection]);
    else siblings.push(connection);
    for (const longest of idle) {
      if (idle.size <= idleMax) break;
      drop(longest);
    }
  }

  function drop(connection: Connection): void {
    void closed(connection);
  }

  async function close(): Promise<void> {
    await Promise.all([...all].map(closed));
  }

  async function closed(connection: Connection): Promise<void> {
    leaveIdle(connection);
    // A socket that is still connecting is not yet the client's to destroy.
    connection.socket?.destroy();
    await connection.client.destroy();
    all.delete(connection);
  }

  function leaveIdle(connection: Connection): void {
    if (!idle.delete(connection)) return;
    const siblings = idleOfOrigin.get(connection.origin) ?? [];
    siblings.splice(siblings.lastIndexOf(connection), 1);
    if (siblings.length === 0) idleOfOrigin.delete(connection.origin);
  }
}
