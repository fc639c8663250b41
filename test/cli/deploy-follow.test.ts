import t from 'tap';
import type { ApiClient, Patience } from '../../src/cli/api-client.ts';
import { followLog } from '../../src/cli/deploy-follow.ts';
import type { DeploymentId } from '../../src/domain.ts';
import { AppError } from '../../src/errors.ts';

const GREETING = 'retry: 1000\n\n';
const HEARTBEAT = ': still here\n\n';
const END = 'id: 0\nevent: end\ndata: {"status":"succeeded"}\n\n';

t.test('a silent log is followed to its end, however often its connection is cut', async (t) => {
  const silent = [GREETING, HEARTBEAT];
  t.match(await follow([silent, silent, silent, silent, [GREETING, END]]), {
    kind: 'ended',
    status: 'succeeded',
  });
});

t.test('a service that only greets is given up', async (t) => {
  const greeted = [GREETING];
  await t.rejects(follow([greeted, greeted, greeted, [GREETING, END]]), { code: 'unavailable' });
});

/** Over connections that say this, with the patience for two that bring nothing. */
function follow(connections: string[][]) {
  let failures = 0;
  const patience: Patience = {
    reset() {
      failures = 0;
    },
    async wait(why) {
      failures += 1;
      if (failures > 2) throw new AppError('unavailable', why);
    },
  };
  const api: ApiClient = {
    patience: () => patience,
    call: async () => ({ ok: false, status: 403, message: 'it may only read logs' }),
    stream: async () => ({ ok: true, body: said(connections.shift() ?? []) }),
    close: async () => undefined,
  };
  const output = { write: async () => true, end: async () => undefined };
  return followLog('dpl_test' as DeploymentId, api, output, async () => undefined);
}

async function* said(pieces: string[]): AsyncGenerator<Uint8Array, void, undefined> {
  for (const piece of pieces) yield Buffer.from(piece);
}
