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
        options: { auth: false },
        handler: () => ({ status: 'ok' }),
      });
      server.route({
        method: 'GET',
        path: '/readyz',
        options: { auth: false },
        async handler() {
          const problem = await check();
          if (problem !== null) throw new AppError('unavailable', problem, { retryAfterSeconds: 1 });
          return { status: 'ok' };
        },
      });
    },
  };
}
