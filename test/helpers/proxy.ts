import { once } from 'node:events';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import type { Test } from 'tap';

/**
 * What becomes of a connection: it passes; it is closed before anything is read; the request passes and the answer
 * is lost, or waits for `release`; nothing passes; or it breaks off after so many bytes of answers.
 */
export type Fate = 'pass' | 'refuse' | 'lose-answer' | 'hold' | 'nothing' | { breakAfterBytes: number };

export interface Proxy {
  url: string;
  /** How many connections there were so far. */
  connections(): number;
  /** Resolves at the connection of this number. */
  connected(number: number): Promise<void>;
  /** What becomes of the coming connections, one after the other; those after them pass. */
  fates(...fates: Fate[]): void;
  /** Resolves when an answer is being held. */
  held(): Promise<void>;
  /** What was held passes, and whatever comes on those connections. */
  release(): void;
  /** Where connections lead to from now on. */
  leadTo(url: string): void;
}

/** A line between client and service that breaks where a test says. Closed with the test. */
export async function startProxy(t: Test, target: string): Promise<Proxy> {
  let fates: Fate[] = [];
  let to = new URL(target);
  let count = 0;
  const sockets = new Set<Socket>();
  let isReleased = false;
  let heldAnswers: (() => void)[] = [];
  const server = createServer((client) => {
    count += 1;
    const fate = fates.shift() ?? 'pass';
    sockets.add(client);
    client.on('error', () => undefined);
    if (fate === 'refuse') {
      client.destroy();
      return;
    }
    if (fate === 'nothing') return;
    const service = connect(Number(to.port), to.hostname);
    sockets.add(service);
    service.on('error', () => client.destroy());
    client.on('close', () => service.destroy());
    service.on('close', () => client.destroy());
    client.pipe(service);
    let passedBytes = 0;
    service.on('data', (bytes) => {
      if (fate === 'hold' && !isReleased) {
        heldAnswers.push(() => client.write(bytes));
        server.emit('held');
        return;
      }
      const maxBytes =
        fate === 'lose-answer'
          ? 0
          : typeof fate === 'object'
            ? fate.breakAfterBytes
            : Number.POSITIVE_INFINITY;
      client.write(bytes.subarray(0, maxBytes - passedBytes));
      passedBytes += bytes.length;
      if (passedBytes >= maxBytes) client.destroySoon();
    });
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  t.teardown(() => {
    for (const socket of sockets) socket.destroy();
    server.close();
  });
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    connections: () => count,
    async connected(number) {
      while (count < number) await once(server, 'connection');
    },
    fates(...next) {
      fates = next;
    },
    async held() {
      if (heldAnswers.length === 0) await once(server, 'held');
    },
    release() {
      isReleased = true;
      for (const pass of heldAnswers) pass();
      heldAnswers = [];
    },
    leadTo(url) {
      to = new URL(url);
    },
  };
}
