import type { Server as Listener } from 'node:http';
import type { Socket } from 'node:net';
import type { Duplex } from 'node:stream';
import type { TLSSocket } from 'node:tls';
import type { Effects } from '../effects.ts';
import { parserOf } from '../unread.ts';

/** A client sends 2 KB before its handshake is over, or less. */
const HANDSHAKE_MAX_BYTES = 16 * 1024;
const LOOK_EVERY_MS = 100;

/**
 * Closes connections that send too much before their handshake is over: OpenSSL takes a first message of 131 KB, and keeps
 * it twice until it is complete. 4,300 strangers whose messages never were took 1.1 GB. No event tells what has come, so
 * all are looked at.
 */
export function limitHandshakes(listener: Listener, effects: Pick<Effects, 'after'>): void {
  const handshaking = new Set<Socket>();
  let isLooking = false;
  listener.on('connection', (socket: Socket) => {
    handshaking.add(socket);
    socket.once('close', () => handshaking.delete(socket));
    if (!isLooking) lookLater();
  });
  listener.on('secureConnection', (socket: TLSSocket) => handshaking.delete(acceptedSocket(socket)));

  function lookLater(): void {
    isLooking = true;
    effects.after(LOOK_EVERY_MS, () => {
      isLooking = false;
      for (const socket of handshaking) if (socket.bytesRead > HANDSHAKE_MAX_BYTES) socket.destroy();
      if (handshaking.size > 0) lookLater();
    });
  }
}

/** A client updates its keys after millions of records, if at all. */
const KEYS_MAX = 16;

/**
 * Closes a connection whose client begins another handshake, or updates its keys again and again. No client needs the
 * one, whose message OpenSSL would keep as long as the connection is idle. An update takes 5 µs, and one read brings 2,400:
 * five strangers who sent 2 MB each held everybody up for 2 s.
 */
export function limitRekeying(socket: TLSSocket): void {
  let keys = 0;
  socket.disableRenegotiation();
  // The only event of an update; the key itself is not looked at.
  socket.on('keylog', () => {
    keys += 1;
    if (keys > KEYS_MAX) socket.destroy();
  });
}

/**
 * Has Node parse all that a read from this new connection brings. While answers wait, Node stops reading, and pauses its
 * parser too: the other records of the same read come all the same, and were HPE_PAUSED, so 400. Not to read is enough,
 * as one read brings 64 KiB at most; so it is for later connections of the same parser, with TLS or without.
 */
export function parseAllOfRead(socket: TLSSocket): void {
  const parser = parserOf(socket);
  if (parser !== null) parser.pause = () => undefined;
}

/** Over TLS, requests come on a socket of their own. `_parent`, an internal of Node, is the one that was accepted. */
export function acceptedSocket<Accepted extends Duplex>(socket: Accepted): Accepted {
  return (socket as unknown as { _parent?: Accepted | null })._parent ?? socket;
}
