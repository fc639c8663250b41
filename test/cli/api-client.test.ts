import t from 'tap';
import { createApiClient } from '../../src/cli/api-client.ts';
import { createTerminal } from '../../src/cli/terminal.ts';
import { realEffects } from '../../src/effects.ts';
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
