import type { Plugin } from '@hapi/hapi';
import { AppError } from '../errors.ts';
import { anyQuery } from './input-schemas.ts';
import { routeOptions } from './route-options.ts';

/**
 * `GET /healthz` (the process is alive) and `GET /readyz` (503 if `check` resolves to a problem rather than null), both
 * without a key.
 */
export function health(check: () => Promise<string | null>): Plugin<void> {
  return {
    name: 'health',
    register(server) {
      server.route({
        method: 'GET',
        path: '/healthz',
        options: routeOptions({
          scope: null,
          input: { query: anyQuery },
          operationId: 'getHealth',
          summary: 'Check that the process is alive',
          responses: { 200: { description: 'The process is alive.', resource: 'Health' } },
        }),
        handler: () => ({ status: 'ok' }),
      });
      server.route({
        method: 'GET',
        path: '/readyz',
        options: routeOptions({
          scope: null,
          input: { query: anyQuery },
          operationId: 'getReadiness',
          summary: 'Check that the service is ready',
          description: 'Ready: the database takes writes, and deployments are started and events sent.',
          responses: { 200: { description: 'The service is ready.', resource: 'Health' } },
          errors: { unavailable: 'The service is not ready, or it is stopping.' },
        }),
        async handler() {
          const problem = await check();
          if (problem !== null) throw new AppError('unavailable', problem, { retryAfterSeconds: 1 });
          return { status: 'ok' };
        },
      });
    },
  };
}
