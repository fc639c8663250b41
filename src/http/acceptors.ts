import { once } from 'node:events';
import type { Server as Listener } from 'node:http';
import { createServer, type Server as NetServer, type Socket } from 'node:net';
import type { Plugin } from '@hapi/hapi';
import type { ListenAddress } from '../config.ts';
import type { Effects } from '../effects.ts';
import { loadCLibrary } from '../libc.ts';
import type { Logger } from '../logger.ts';

/** How many connections are accepted in one turn of the event loop. Each costs a descriptor. */
const ACCEPTORS = 16;

/** What keeps a connection from being accepted, no file that could be opened as a rule, comes again in every turn. */
const TOLD_EVERY_MS = 60_000;

/** fcntl(2) */
const F_DUPFD_CLOEXEC = 1030;

/**
 * libuv accepts one connection of a socket in a turn of the event loop (libuv#3696). With 256 busy connections a turn takes
 * 30 ms, and of 256 that came at once the last was answered after 2 s, and is after 0.2 s now. So further servers listen on
 * the socket of `listener`, which is started here too, and hand it what they accept. They end with it, and keep to its
 * maximum together.
 */
export function acceptors(
  listener: Listener,
  { host, port }: ListenAddress,
  effects: Effects,
  logger: Logger,
): Plugin<void> {
  const others: NetServer[] = [];
  let toldAtMs = Number.NEGATIVE_INFINITY;
  const { maxConnections } = listener;
  let connections = 0;
  let ofOthers = 0;

  listener.on('connection', (socket: Socket) => {
    connections++;
    socket.once('close', () => connections--);
  });
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
      // Not by hapi, which would look whether the host is one with an expression that takes 8 ms to make. Before it has
      // started: of a listener that does not listen it could not be stopped.
      server.ext('onPreStart', async () => {
        listener.listen(port, host);
        await once(listener, 'listening');
        listener.on('error', stumbled);
      });
      server.ext('onPostStart', async () => {
        const duplicate = await loadDuplicate();
        const descriptor = descriptorOf(listener);
        for (let count = 1; count < ACCEPTORS; count++) {
          const other = createServer({ allowHalfOpen: true, noDelay: true }, take);
          other.on('error', stumbled);
          other.listen({ fd: duplicate(descriptor) });
          others.push(other);
        }
        await Promise.all(others.map((other) => once(other, 'listening')));
      });
    },
  };

  function take(socket: Socket): void {
    if (connections >= maxConnections) {
      socket.destroy();
      return;
    }
    leaveToListener(1);
    socket.once('close', () => leaveToListener(-1));
    listener.emit('connection', socket);
  }

  /** Whoever waits to be accepted waits on. */
  function stumbled(error: unknown): void {
    if (effects.monotonicMs() - toldAtMs < TOLD_EVERY_MS) return;
    toldAtMs = effects.monotonicMs();
    logger.warn({ err: error }, 'a connection could not be accepted');
  }

  function leaveToListener(change: 1 | -1): void {
    ofOthers += change;
    listener.maxConnections = maxConnections - ofOthers;
  }
}

/** Node's own word for what can be listened to: "an object with an fd member". */
function descriptorOf(listener: Listener): number {
  const { _handle } = listener as unknown as { _handle: { fd: number } };
  return _handle.fd;
}

/** libuv watches a descriptor once, but as many of one socket as there are. */
async function loadDuplicate(): Promise<(descriptor: number) => number> {
  const { declare, lastError } = await loadCLibrary();
  const fcntl = declare('int fcntl(int descriptor, int command, ...)');
  return (descriptor) => {
    const copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 'int', 0);
    if (copy === -1) throw new Error(`fcntl: ${lastError()}`);
    return copy;
  };
}
