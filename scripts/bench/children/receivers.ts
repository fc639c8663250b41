import { readFileSync } from 'node:fs';
import { type AddressInfo, createServer, type Server, type Socket } from 'node:net';
import { createServer as createTlsServer } from 'node:tls';
import { monotonicMs } from '../processes.ts';
import { answerRequests } from './answer.ts';

/*
 * Receivers of deliveries, each on a port of its own, that answer at once and count. Plain sockets, as Node's own HTTP
 * server would take as much of the machine as the sender.
 */

export type ReceiversRequest =
  | { kind: 'open'; count: number; tls?: { certPath: string; keyPath: string } }
  /** Starts counting from 0. */
  | { kind: 'reset' }
  | { kind: 'arrivals' };

export interface Arrivals {
  count: number;
  /** When the first and the last of them came, on the machine's monotonic clock. */
  firstAtMs: number;
  lastAtMs: number;
}

const ANSWER = 'HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n';

let arrivals: Arrivals = { count: 0, firstAtMs: 0, lastAtMs: 0 };

answerRequests(async (request: ReceiversRequest) => {
  switch (request.kind) {
    case 'open':
      return await Promise.all(Array.from({ length: request.count }, () => open(request.tls)));
    case 'reset':
      arrivals = { count: 0, firstAtMs: 0, lastAtMs: 0 };
      return undefined;
    case 'arrivals':
      return arrivals;
    default:
      return request satisfies never;
  }
});

/** Opens a receiver; resolves to its URL. */
async function open(tls: { certPath: string; keyPath: string } | undefined): Promise<string> {
  const server: Server =
    tls === undefined
      ? createServer(receive)
      : createTlsServer({ cert: readFileSync(tls.certPath), key: readFileSync(tls.keyPath) }, receive);
  // The sender may be killed during a handshake.
  server.on('tlsClientError', () => undefined);
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as AddressInfo;
  return `${tls === undefined ? 'http' : 'https'}://127.0.0.1:${port}/hook`;
}

/** A request's head and body may come in pieces. */
function receive(socket: Socket): void {
  let head = '';
  let missingBytes = -1;
  socket.setNoDelay(true);
  socket.on('error', () => socket.destroy());
  socket.on('data', (piece: Buffer) => {
    if (missingBytes === -1) {
      head += piece.toString('latin1');
      const end = head.indexOf('\r\n\r\n');
      if (end === -1) return;
      const length = Number(/\r\ncontent-length: *(\d+)/i.exec(head)?.[1] ?? 0);
      missingBytes = length - (head.length - end - 4);
      head = '';
    } else {
      missingBytes -= piece.length;
    }
    if (missingBytes > 0) return;
    missingBytes = -1;
    count();
    socket.write(ANSWER, 'latin1');
  });
}

function count(): void {
  const nowMs = monotonicMs();
  if (arrivals.count === 0) arrivals.firstAtMs = nowMs;
  arrivals.count += 1;
  arrivals.lastAtMs = nowMs;
}
