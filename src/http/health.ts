import type { Plugin } from '@hapi/hapi';
import { AppError } from '../errors.ts';

/**
 * `GET /healthz`: the process lives. `GET /readyz`: `check` resolves to null, or to what is not ready, and
 * then it is 503. Neither asks for a key.
 */
export function health(check: () => Promise<string | null>): Plugin<void> {
  return {
    name: 'health',
    register(server) {
      server.route({
        method: 'GET',
        path: '/healthz',
        options: {
          auth: false,
          plugins: {
            openapi: {
              operationId: 'getHealth',
              summary: 'Whether the process lives',
              responses: { 200: { description: 'It does.', resource: 'Health' } },
            },
          },
        },
        handler: () => ({ status: 'ok' }),
      });
      server.route({
        method: 'GET',
        path: '/readyz',
        options: {
          auth: false,
          plugins: {
            openapi: {
              operationId: 'getReadiness',
              summary: 'Whether the service can do its work',
              description:
                'The database takes writes, and what starts deployments and sends events is alive.',
              responses: { 200: { description: 'It can.', resource: 'Health' } },
              errors: { unavailable: 'It cannot, or it is stopping.' },
            },
          },
        },
        async handler() {
          const problem = await check();
          if (problem !== null) throw new AppError('unavailable', problem, { retryAfterSeconds: 1 });
          return { status: 'ok' };
        },
      });
    },
  };
}
