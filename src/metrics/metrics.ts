import { version } from '../assets.ts';
import { type ListenAddress, listenText } from '../config.ts';
import type { Effects } from '../effects.ts';
import { lagHistogram, watchLag } from '../event-loop.ts';
import type { Logger } from '../logger.ts';
import { type Metric, ownCells, readMetric } from '../metric-cells.ts';
import type { Reads } from '../store/store.ts';
import { createEndings } from './endings.ts';
import { exposition } from './exposition.ts';
import { startMetricsListener } from './listener.ts';
import { processMetrics } from './process.ts';
import { deploymentMetrics, dueMetrics, fileMetrics } from './readings.ts';
import { type AnsweredRequest, createRequestMetrics } from './requests.ts';

interface MetricsOptions {
  listen: ListenAddress;
  reads: Reads;
  dbPath: string;
  /** What the other threads count. */
  metrics: readonly Metric[];
  /** How many commands may run at a time. */
  commandSlots: number;
  effects: Effects;
  logger: Logger;
}

export interface Metrics {
  /** With the actual port, also for port 0. */
  listen: ListenAddress;
  url: string;
  /** Call this when a request to the API is over. */
  onAnswer(request: AnsweredRequest): void;
  /** From the call on, nothing is read of the database any more. */
  close(): Promise<void>;
}

/**
 * Serves Prometheus metrics of all of davit. Each thread counts its own work; what waits in the database is read at each
 * scrape, at a bounded cost. Throws what `startMetricsListener` throws.
 */
export async function startMetrics(options: MetricsOptions): Promise<Metrics> {
  const { listen, reads, dbPath, metrics, commandSlots, effects, logger } = options;
  const startedAtMs = effects.now();
  const requests = createRequestMetrics();
  const endings = createEndings(reads);
  const lag = lagHistogram(ownCells, 'http');
  let closed = false;
  let scraping: Promise<string> | undefined;

  const listener = await startMetricsListener(listen, scrapeOnce, logger);
  const lagLoop = watchLag(lag, effects);
  const address = { ...listen, port: listener.port };
  const url = `http://${listenText(address)}/metrics`;
  logger.info({ url }, 'metrics are served');

  return {
    listen: address,
    url,
    onAnswer: requests.count,
    async close() {
      closed = true;
      await listener.close();
      await lagLoop.stop();
    },
  };

  /** Concurrent requests share one scrape. */
  function scrapeOnce(): Promise<string> {
    scraping ??= scrape().finally(() => {
      scraping = undefined;
    });
    return scraping;
  }

  async function scrape(): Promise<string> {
    const isWanted = () => !closed;
    await endings.catchUp(isWanted);
    const due = await dueMetrics(reads, effects.now(), isWanted);
    if (closed) throw new Error('the service has stopped'); // and the database may be closed
    return exposition([
      readMetric('gauge', { name: 'davit_build_info', help: 'Always 1; the labels tell the versions.' }, [
        { labels: { version, node: process.versions.node }, value: 1 },
      ]),
      ...requests.metrics(),
      ...deploymentMetrics(reads, commandSlots),
      ...endings.metrics(),
      ...due,
      ...metrics,
      lag,
      ...fileMetrics(dbPath),
      ...processMetrics(startedAtMs),
    ]);
  }
}
