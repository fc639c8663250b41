import type { Server } from '@hapi/hapi';
import type { ServeConfig } from '../config.ts';
import { type Effects, LONGEST_TIMER_MS } from '../effects.ts';
import type { Logger } from '../logger.ts';
import type { Store } from '../store/store.ts';
import { createAnswers } from './answers.ts';
import { authentication } from './auth.ts';
import { deliveries } from './deliveries.ts';
import { deployments } from './deployments.ts';
import { docs } from './docs.ts';
import { health } from './health.ts';
import { logs } from './logs.ts';
import { openapi } from './openapi.ts';
import { createPages } from './pages.ts';
import { projects } from './projects.ts';
import { createHttpServer, type HttpServerOptions, IDLE_MS } from './server.ts';
import type { Watches } from './watches.ts';
import { type Ping, webhooks } from './webhooks.ts';

export interface ApiOptions extends Pick<HttpServerOptions, 'tls' | 'onAnswer' | 'stopping'> {
  config: ServeConfig;
  store: Store;
  watches: Watches;
  ping: Ping;
  /** Resolves to what keeps davit from doing its work, or null. */
  checkReadiness: () => Promise<string | null>;
}

/** Creates the HTTP server with all resources, without listening. */
export function createApi(options: ApiOptions, effects: Effects, logger: Logger): Promise<Server> {
  const { config, store, watches, ping, checkReadiness, tls, onAnswer, stopping } = options;
  const pages = createPages(store.reads.instance.cursorSecret(), effects);
  const answers = createAnswers(store.writer);
  const webhookUrlRules = { allowHttp: config.webhookAllowHttp, allowedCidrs: config.webhookAllowCidrs };
  return createHttpServer(
    {
      listen: config.listen,
      tls,
      rateLimit: config.rateLimit,
      onAnswer,
      stopping,
      timeouts: { idleMs: idleMsOf(config) },
    },
    {
      authentication: authentication(store, config.trustProxyCidrs, effects, logger),
      resources: [
        projects(store.reads, pages),
        deployments(store.reads, answers, pages, watches, effects, config.maxQueued),
        logs(store.reads, watches, effects),
        webhooks(store.reads, answers, pages, webhookUrlRules, ping, config.webhookTimeoutMs),
        deliveries(store.reads, answers, pages, effects),
        health(checkReadiness),
        openapi(),
        docs(),
      ],
    },
    effects,
    logger,
  );
}

/** Between the end of a ping's attempt and its response, at most. */
const PING_RESPONSE_MS = 10_000;

/** Longer than any ping, during which the connection that requested it is idle. */
function idleMsOf({ webhookTimeoutMs }: ServeConfig): number {
  return Math.min(Math.max(IDLE_MS, webhookTimeoutMs + PING_RESPONSE_MS), LONGEST_TIMER_MS);
}
