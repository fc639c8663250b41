import t from 'tap';
import { type ApiClient, createApiClient } from '../../src/cli/api-client.ts';
import { createTerminal } from '../../src/cli/terminal.ts';
import type { DeploymentId, ProjectId } from '../../src/domain.ts';
import { type Effects, realEffects } from '../../src/effects.ts';
import { QUEUED } from '../helpers/deploy-client.ts';
import { fakeEffects, hurried } from '../helpers/effects.ts';
import { type Receiver, silence, startReceiver, status } from '../helpers/receiver.ts';

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

t.test('what only adds to a message is not asked for again once its time is over', async (t) => {
  const effects = fakeEffects();
  const service = await startReceiver(t, {
    answers: [
      (response) => {
        effects.advance(2_000);
        response.socket?.destroy();
      },
      status(200, { body: JSON.stringify(QUEUED) }),
    ],
  });
  const client = clientOf(service, hurried(effects));
  t.equal(await client.deployment('dpl_1' as DeploymentId, 'repeatedly'), undefined);
  t.equal(service.requests.length, 1);
  await client.close();
});

function clientOf(service: Receiver, effects: Effects = realEffects): ApiClient {
  return createApiClient(
    { baseUrl: new URL(service.url), key: 'key', caPem: null, retryForMs: 60_000, version: '0.0.0' },
    {
      terminal: createTerminal(process, () => undefined),
      commandLine: [],
      environment: {},
      startEnvironment: {},
      effects,
      onSignal: () => () => undefined,
      exit: () => undefined,
      exitWithThreads: () => undefined,
      leaveDirectory: () => undefined,
    },
  );
}
