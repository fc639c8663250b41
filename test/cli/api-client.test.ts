import t from 'tap';
import { type ApiClient, createApiClient } from '../../src/cli/api-client.ts';
import { createTerminal } from '../../src/cli/terminal.ts';
import type { ProjectId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { type Receiver, silence, startReceiver } from '../helpers/receiver.ts';

t.test('a call still under way when the client is closed fails as unavailable', async (t) => {
  const service = await startReceiver(t, { answers: [silence()] });
  const client = clientOf(service);
  const called = client.call({ method: 'GET', path: '/v2/deployments' });
  const refused = t.rejects(called, { code: 'unavailable', message: /is closed/ });
  const glance = client.project('prj_1' as ProjectId);
  for (const _ of ['called', 'looked']) await service.next();
  await client.close();
  await refused;
  t.equal(await glance, undefined, 'what only adds to a message fails without a word');
});

function clientOf(service: Receiver): ApiClient {
  return createApiClient(
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
}
