import { randomBytes } from 'node:crypto';
import { connect, type Socket } from 'node:net';
import { percentile } from '../statistics.ts';
import { answerRequests } from './answer.ts';

/*
 * The load client: HTTP/1.1 over kept-alive connections, one request at a time on each. It does as little work as
 * possible, as it shares the machine with the server. `npm run bench` shows wrk beside it.
 */

export interface LoadRequest {
  url: string;
  connections: number;
  seconds: number;
  /** Before `seconds`, and not counted. */
  warmUpSeconds: number;
  method: 'GET' | 'POST';
  headers: Record<string, string>;
  body?: string;
  /** Whether to send a new one with each request. */
  idempotencyKeys?: boolean;
  /**
   * A fixed rate, however long answers take; latency counts from when a request was due. Without: as fast as possible.
   */
  requestsPerSecond?: number;
}

export interface LoadResult {
  /** All that were answered, those of the warm-up too. */
  requests: number;
  perSecond: number;
  p50Ms: number;
  p99Ms: number;
  maxMs: number;
}

answerRequests(load);

async function load(request: LoadRequest): Promise<LoadResult> {
  const nextText = requestTexts(request);
  const fromMs = performance.now() + request.warmUpSeconds * 1000;
  const untilMs = fromMs + request.seconds * 1000;
  const latenciesMs: number[] = [];
  let requests = 0;
  const pace = paceOf(request);
  const { hostname, port } = new URL(request.url);
  await Promise.all(Array.from({ length: request.connections }, askUntilTheEnd));
  return {
    requests,
    perSecond: latenciesMs.length / request.seconds,
    p50Ms: percentile(latenciesMs, 50),
    p99Ms: percentile(latenciesMs, 99),
    maxMs: percentile(latenciesMs, 100),
  };

  function askUntilTheEnd(): Promise<void> {
    return new Promise((resolve, reject) => {
      let dueAtMs = 0;
      let ended = false;
      const readAnswer = answerReader((status) => {
        const nowMs = performance.now();
        if (!status.startsWith('2')) return fail(new Error(`${request.url} answered ${status}`));
        requests += 1;
        if (nowMs >= fromMs && nowMs < untilMs) latenciesMs.push(nowMs - dueAtMs);
        if (nowMs < untilMs) return ask();
        ended = true;
        socket.destroy();
        resolve();
      }, fail);
      const socket: Socket = connect({
        host: hostname,
        port: Number(port),
        noDelay: true,
        // One buffer for each connection and no stream, which halves the cost of reading.
        onread: { buffer: Buffer.allocUnsafe(64 * 1024), callback: readAnswer },
      });
      socket.on('connect', ask);
      socket.on('error', fail);
      socket.on('close', () => {
        if (!ended) fail(new Error(`${request.url} closed a connection`));
      });

      function ask(): void {
        dueAtMs = pace();
        const waitMs = dueAtMs - performance.now();
        if (waitMs > 0) setTimeout(send, waitMs);
        else send();
      }

      function send(): void {
        socket.write(nextText(), 'latin1');
      }

      function fail(error: Error): void {
        ended = true;
        socket.destroy();
        reject(error);
      }
    });
  }
}

/** Gives a function that returns when the next request is due. */
function paceOf({ requestsPerSecond }: LoadRequest): () => number {
  if (requestsPerSecond === undefined) return () => performance.now();
  let nextAtMs = performance.now();
  return () => {
    nextAtMs += 1000 / requestsPerSecond;
    return nextAtMs;
  };
}

/** Gives a function that returns the text of the next request. */
function requestTexts({
  url,
  method,
  headers,
  body = '',
  idempotencyKeys = false,
}: LoadRequest): () => string {
  const { host, pathname, search } = new URL(url);
  const all = {
    Host: host,
    ...headers,
    ...(method === 'POST'
      ? { 'Content-Type': 'application/json', 'Content-Length': String(Buffer.byteLength(body)) }
      : {}),
  };
  const lines = Object.entries(all).map(([name, value]) => `${name}: ${value}\r\n`);
  const head = `${method} ${pathname}${search} HTTP/1.1\r\n${lines.join('')}`;
  if (!idempotencyKeys) return () => `${head}\r\n${body}`;
  const prefix = randomBytes(8).toString('hex');
  let number = 0;
  return () => {
    number += 1;
    return `${head}Idempotency-Key: ${prefix}-${number}\r\n\r\n${body}`;
  };
}

/** Finds where an answer ends, by its Content-Length; every server here sends one. */
function answerReader(
  onAnswer: (status: string) => void,
  onProblem: (error: Error) => void,
): (bytes: number, buffer: Uint8Array) => boolean {
  let head = '';
  let status = '';
  let missingBytes = -1; // of the body; -1: the head is not complete

  return (bytes, buffer) => {
    if (missingBytes === -1) {
      head += (buffer as Buffer).toString('latin1', 0, bytes);
      const end = head.indexOf('\r\n\r\n');
      if (end === -1) return true;
      const length = /\r\ncontent-length: *(\d+)/i.exec(head)?.[1];
      if (length === undefined) {
        onProblem(new Error(`an answer without Content-Length: ${head.slice(0, end)}`));
        return false;
      }
      status = head.slice(9, 12);
      missingBytes = Number(length) - (head.length - end - 4);
      head = '';
    } else {
      missingBytes -= bytes;
    }
    if (missingBytes > 0) return true;
    missingBytes = -1;
    onAnswer(status);
    return true;
  };
}
