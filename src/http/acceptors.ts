import { once } from 'node:events';
import type { Server as Listener } from 'node:http';
import { createServer, type Server as NetServer, type Socket } from 'node:net';
import type { Plugin } from '@hapi/hapi';
import type { ListenAddress } from '../config.ts';
import type { Effects } from '../effects.ts';
import { loadCLibrary } from '../libc.ts';
import type { Logger } from '../logger.ts';

/** How many connections are accepted in each turn of the event loop. Each acceptor costs a file descriptor. */
const ACCEPTORS = 16;

/** While connections cannot be accepted, usually for want of descriptors, every turn of the event loop fails again. */
const WARN_EVERY_MS = 60_000;

/** fcntl(2) */
const F_DUPFD_CLOEXEC = 1030;

/**
 * libuv accepts one connection per listening socket and turn of the event loop (libuv#3696). With 256 busy connections a
 * turn takes 30 ms: of 256 new connections the last was answered after 2 s, with several sockets after 0.2. So this
 * starts `listener` and further servers on duplicates of its socket, which hand it the connections that they accept,
 * and close with it.
 */
export function acceptors(
  listener: Listener,
  { host, port }: ListenAddress,
  effects: Effects,
  logger: Logger,
): Plugin<void> {
  const others: NetServer[] = [];
  let warnedAtMs = Number.NEGATIVE_INFINITY;

  const close = listener.close.bind(listener);
  listener.close = (onClosed) => {
    const all = [close, ...others.map((other) => other.close.bind(other))];
    const closed = all.map((closeOne) => new Promise((resolve) => closeOne(resolve)));
    void Promise.all(closed).then(() => onClosed?.());
    return listener;
  };

  return {
    name: 'acceptors',
    register(server) {
      // Not by hapi itself: it checks the host with a regular expression that takes 8 ms to build. And before hapi has
      // started: if listening fails after that, hapi cannot be stopped.
      server.ext('onPreStart', async () => {
        listener.listen(port, host);
        await once(listener, 'listening');
        listener.on('error', warn);
      });
      server.ext('onPostStart', async () => {
        const duplicate = await loadDuplicate();
        const descriptor = descriptorOf(listener);
        for (let count = 1; count < ACCEPTORS; count++) {
          const other = createServer({ allowHalfOpen: isHalfOpenAllowed(listener), noDelay: true }, handOver);
          other.on('error', warn);
          other.listen({ fd: duplicate(descriptor) });
          others.push(other);
        }
        await Promise.all(others.map((other) => once(other, 'listening')));
      });
    },
  };

  function handOver(socket: Socket): void {
    listener.emit('connection', socket);
  }

  /** The connection stays in the system's backlog, and is tried again. */
  function warn(error: unknown): void {
    if (effects.monotonicMs() - warnedAtMs < WARN_EVERY_MS) return;
    warnedAtMs = effects.monotonicMs();
    logger.warn({ err: error }, 'a connection could not be accepted');
  }
}

/**
 * As of `listener` itself, an internal of Node: true without TLS. A TLS connection that is closed before its handshake
 * is over would otherwise keep its descriptor until the handshake's time limit.
 */
function isHalfOpenAllowed(listener: Listener): boolean {
  return (listener as unknown as { allowHalfOpen: boolean }).allowHalfOpen;
}

/** `_handle` and its `fd` are internals of Node, which its documentation mentions as what `server.listen` accepts. */
function descriptorOf(listener: Listener): number {
  const { _handle } = listener as unknown as { _handle: { fd: number } };
  return _handle.fd;
}

/** libuv polls each descriptor for one handle only, but it can poll several descriptors of the same socket. */
async function loadDuplicate(): Promise<(descriptor: number) => number> {
  const { declare, lastError } = await loadCLibrary();
  const fcntl = declare('int fcntl(int descriptor, int command, ...)');
  return (descriptor) => {
    const copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 'int', 0);
    if (copy === -1) throw new Error(`fcntl: ${lastError()}`);
    return copy;
  };
}
