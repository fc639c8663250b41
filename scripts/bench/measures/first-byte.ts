import { once } from 'node:events';
import { Agent, type IncomingMessage, request } from 'node:http';
import { createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { openFile, serveFor } from '../davit.ts';
import { alternate, figureRow, type Measure, rowBelow, samplesOf } from '../measure.ts';
import { percentile } from '../statistics.ts';

const NAME = 'davit';

/**
 * The time of the commit cannot be seen from outside; it is between the request and its answer. This process is client
 * and receiver, so that all times are of one clock. Counted from the answer, the figure is too small by the time that
 * the answer takes to arrive, so a whole round trip, measured right after, is added: that figure is judged. Counted
 * from the request, it is too large by the time that accepting takes, fsync included.
 */
export const firstByte: Measure = {
  name: 'first-byte',
  title: 'from commit to the first byte at an idle receiver, one deployment at a time',
  async run(bench) {
    const arrivals = await startReceiver();
    bench.defer(arrivals.close);
    const directory = join(bench.directory, 'davit');
    const file = openFile(directory);
    const { keyId, secret } = await file.key();
    const projectId = await file.project('website');
    await file.webhook(keyId, arrivals.url, ['deployment.created']);
    await file.close();
    const davit = await serveFor(bench, directory);
    const agent = new Agent({ keepAlive: true });
    bench.defer(() => agent.destroy());

    const results = await alternate(bench, [{ name: NAME, run: oneAfterTheOther }], { rehearse: true });
    const figure = (name: Figure) => samplesOf(results, NAME, name);
    return [
      figureRow('from the answer on and a round trip, p50', 'ms', figure('p50Ms')),
      rowBelow('from the answer on and a round trip, p99', 'ms', figure('p99Ms'), 5),
      figureRow('from the request on, p50', 'ms', figure('fromRequestP50Ms')),
      figureRow('from the request on, p99', 'ms', figure('fromRequestP99Ms')),
    ];

    async function oneAfterTheOther(): Promise<Record<Figure, number>> {
      const fromRequestMs: number[] = [];
      const fromAnswerMs: number[] = [];
      const untilMs = performance.now() + bench.seconds * 1000;
      while (performance.now() < untilMs || fromAnswerMs.length < 100) {
        const arrival = arrivals.next();
        const sentAtMs = performance.now();
        const answeredAtMs = await ask('POST', `/v2/projects/${projectId}/deployments`, 201);
        const arrivedAtMs = await arrival;
        await delay(5); // until davit is idle again
        const askedAtMs = performance.now();
        const roundTripMs = (await ask('GET', '/healthz', 200)) - askedAtMs;
        fromRequestMs.push(arrivedAtMs - sentAtMs);
        fromAnswerMs.push(arrivedAtMs - answeredAtMs + roundTripMs);
      }
      return {
        p50Ms: percentile(fromAnswerMs, 50),
        p99Ms: percentile(fromAnswerMs, 99),
        fromRequestP50Ms: percentile(fromRequestMs, 50),
        fromRequestP99Ms: percentile(fromRequestMs, 99),
      };
    }

    /** Resolves to when the head of the answer arrived. */
    async function ask(method: 'GET' | 'POST', path: string, status: number): Promise<number> {
      const headers = { Authorization: `Bearer ${secret}`, 'Content-Type': 'application/json' };
      const sent = request(`${davit.url}${path}`, { agent, method, headers });
      sent.end(method === 'POST' ? '{"ref":"v1.2.3"}' : undefined);
      const [response] = (await once(sent, 'response')) as [IncomingMessage];
      const answeredAtMs = performance.now();
      if (response.statusCode !== status) throw new Error(`davit answered ${response.statusCode}`);
      await once(response.resume(), 'end');
      return answeredAtMs;
    }
  },
};

type Figure = 'p50Ms' | 'p99Ms' | 'fromRequestP50Ms' | 'fromRequestP99Ms';

/** Answers each request at once; `next` resolves to when the first byte of the next one arrives. */
async function startReceiver() {
  let waiting: PromiseWithResolvers<number> | undefined;
  const server = createServer((socket: Socket) => {
    socket.setNoDelay(true).on('error', () => undefined);
    socket.on('data', (piece) => {
      // davit sends a request in one write, so head and body arrive together.
      waiting?.resolve(performance.now());
      waiting = undefined;
      if (piece.includes('\r\n\r\n')) socket.write('HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n');
    });
  });
  await once(server.listen(0, '127.0.0.1'), 'listening');
  const address = server.address();
  if (address === null || typeof address === 'string') throw new Error('no port');
  return {
    url: `http://127.0.0.1:${address.port}/hook`,
    next(): Promise<number> {
      waiting = Promise.withResolvers();
      return waiting.promise;
    },
    close: () => server.close(),
  };
}
