import { lookup } from 'node:dns/promises';
import { once } from 'node:events';
import { connect } from 'node:net';
import t from 'tap';
import { createApiClient, isUnsent } from '../../src/cli/api-client.ts';
import { createTerminal } from '../../src/cli/terminal.ts';
import { realEffects } from '../../src/effects.ts';
import { NOWHERE } from '../helpers/nowhere.ts';
import { silence, startReceiver } from '../helpers/receiver.ts';

t.test('a call still under way when the client is closed fails as unavailable', async (t) => {
  const service = await startReceiver(t, { answers: [silence()] });
  const client = createApiClient(
    { baseUrl: new URL(service.url), key: 'key', caPem: null, retryForMs: 60_000, version: '0.0.0' },
    {
      terminal: createTerminal(process, () => undefined),
      commandLine: [],
      environment: {},
      effects: realEffects,
      onSignal: () => () => undefined,
      exit: () => undefined,
      exitWithThreads: () => undefined,
      leaveDirectory: () => undefined,
    },
  );
  const called = client.call({ method: 'GET', path: '/v2/deployments' });
  const refused = t.rejects(called, { code: 'unavailable', message: /is closed/ });
  await service.next();
  await client.close();
  await refused;
});

t.test(
  'of a request that cannot connect nothing was sent; one that becomes unreachable later may be',
  async (t) => {
    const refused = await once(connect(1, '127.0.0.1'), 'connect').catch((error) => error);
    const unknown = await lookup(NOWHERE).catch((error) => error);
    for (const error of [refused, unknown, new AggregateError([refused])])
      t.ok(isUnsent(error), error.message);
    for (const syscall of ['read', 'write']) {
      t.notOk(isUnsent(Object.assign(new Error('unreachable'), { code: 'EHOSTUNREACH', syscall })));
    }
    t.notOk(isUnsent(new Error('another')));
  },
);
