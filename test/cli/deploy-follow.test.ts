import t from 'tap';
import type { ApiClient } from '../../src/cli/api-client.ts';
import { awaitEnd, followLog } from '../../src/cli/deploy-follow.ts';
import type { LogOutput } from '../../src/cli/log-output.ts';
import { GaveUp, type Patience } from '../../src/cli/patience.ts';
import type { Deployment, DeploymentId } from '../../src/domain.ts';
import { fakeEffects, hurried } from '../helpers/effects.ts';

const ID = 'dpl_test' as DeploymentId;
const GREETING = 'retry: 1000\n\n';
const HEARTBEAT = ': still here\n\n';
const PAUSED = "the project is paused: it waits for 'davit admin project resume'";
const END = 'id: 0\nevent: end\ndata: {"status":"succeeded"}\n\n';

t.test('a silent log is followed to its end, however often its connection is cut', async (t) => {
  const silent = [GREETING, HEARTBEAT];
  t.match(await follow([silent, silent, silent, silent, [GREETING, END]]), {
    kind: 'ended',
    status: 'succeeded',
  });
});

t.test('a service that sends only the greeting is given up', async (t) => {
  const greeted = [GREETING];
  await t.rejects(follow([greeted, greeted, greeted, [GREETING, END]]), { code: 'unavailable' });
});

t.test('a log is resumed over several connections, and every byte is written once', async (t) => {
  const asked: unknown[] = [];
  const written: string[] = [];
  const outcome = await follow(
    [
      [`${GREETING}id: 4\ndata: {"status":"failed"}\ndata:\n\n`],
      [`${GREETING}id: 18\ndata: two\ndata:\n\n`],
      [`${GREETING}id: 9ł\ndata: of no place\n\nid: 24\ndata: thr`],
      [`${GREETING}id: ł9\nevent: of another kind\ndata: {"status":"failed"}\n\n`],
      [`${GREETING}event: end\ndata: {"status":"of a later davit"}\n\nevent: end\ndata: x\n\n`],
      [`${GREETING}id: 24\ndata: three\ndata:\n\n`, END],
    ],
    {
      onStream: (request) => asked.push(request.headers?.['Last-Event-ID']),
      mayWrite: async () => void written.push('may it?'),
      write: async (bytes) => {
        written.push(String(Buffer.from(bytes)));
        return true;
      },
    },
  );
  t.match(outcome, { kind: 'ended', status: 'succeeded', deployment: null });
  t.strictSame(asked, ['0', '4', '18', '18', '18', '18']);
  t.strictSame(
    written,
    ['{"status":"failed"}\n', 'two\n', 'of no place', 'three\n'].flatMap((text) => ['may it?', text]),
  );
});

t.test('once its output is closed, the client writes no more but still follows to the end', async (t) => {
  let written = 0;
  const write = async () => {
    written += 1;
    return false;
  };
  const message = 'id: 1\ndata: x\n\n';
  t.match(await follow([[GREETING, message, message, END]], { write }), { kind: 'ended' });
  t.equal(written, 1);
});

t.test('an error that is not a dropped connection is not retried', async (t) => {
  const write = () => Promise.reject(new Error('the disk is full'));
  await t.rejects(follow([[GREETING, 'data: x\n\n'], [END]], { write }), { message: 'the disk is full' });
});

t.test('waiting polls until the deployment has ended or the service refuses', async (t) => {
  const effects = fakeEffects();
  const asked: unknown[] = [];
  const told: string[] = [];
  const note = (text: string) => void told.push(text);
  const answerMs = [20_000, 400, 20_000];
  const statuses = ['queued', 'queued', 'failed'];
  const api = apiOf({
    call: async ({ path, delayMs }) => {
      asked.push([path, delayMs]);
      effects.advance(answerMs.shift() ?? 0);
      return { ok: true, body: { status: statuses.shift() } as never };
    },
    project: async () => ({ status: 'paused' }),
  });
  t.match(await awaitEnd(ID, api, hurried(effects), note), {
    kind: 'ended',
    status: 'failed',
    deployment: { status: 'failed' },
  });
  t.strictSame(told, [PAUSED], 'only at the first look');
  t.strictSame(asked, Array(3).fill(['/v2/deployments/dpl_test?wait=20', 20_000]));
  t.equal(effects.monotonicMs(), 41_000, 'not more often than once a second');
  const refusal = {
    ok: false as const,
    status: 403,
    isDavits: true,
    mayBeDone: false,
    message: 'it may not',
  };
  t.strictSame(await awaitEnd(ID, apiOf({ call: async () => refusal }), effects, note), {
    kind: 'refused',
    refusal,
  });
});

t.test('at its first heartbeat, a deployment that printed nothing is looked at, once', async (t) => {
  const told: string[] = [];
  const note = (text: string) => void told.push(text);
  const silent = [GREETING, HEARTBEAT, HEARTBEAT];
  await follow([silent, silent, [GREETING, END]], { note }, showing('queued'));
  t.strictSame(told, [PAUSED]);
  await follow([[...silent, END]], { note }, showing('running'));
  await follow([[...silent, END]], { note }, { ...showing('queued'), project: async () => undefined });
  const looks: unknown[] = [];
  const deployment: ApiClient['deployment'] = async (_, howOften) => void looks.push(howOften);
  await follow([[GREETING, 'data: x\n\n', HEARTBEAT, END]], { note }, { deployment });
  await follow([[GREETING, END]], { note }, { deployment });
  t.equal(told.length, 1);
  t.strictSame(looks, ['repeatedly', 'repeatedly'], 'each at the end only');
});

t.test('the status is told before the rest of the deployment is asked for', async (t) => {
  const events: string[] = [];
  const outcome = await follow(
    [[GREETING, END]],
    { onEnd: (status) => void events.push(status) },
    { deployment: async () => void events.push('asked') },
  );
  t.strictSame(outcome, { kind: 'ended', status: 'succeeded', deployment: null });
  t.strictSame(events, ['succeeded', 'asked']);
});

t.test(
  'while a deployment is looked at its log goes on, and what is seen too late is not told',
  async (t) => {
    const looked = Promise.withResolvers<Deployment>();
    const told: string[] = [];
    const written: string[] = [];
    const outcome = await follow(
      [[GREETING, HEARTBEAT, 'data: x\n\n', END]],
      {
        note: (text) => void told.push(text),
        write: async (bytes) => {
          written.push(String(Buffer.from(bytes)));
          looked.resolve({ status: 'queued' } as Deployment);
          return true;
        },
      },
      { ...showing('queued'), deployment: () => looked.promise },
    );
    t.match(outcome, { kind: 'ended', status: 'succeeded' });
    t.strictSame([written, told], [['x'], []]);
  },
);

interface Following {
  onStream(request: Parameters<ApiClient['stream']>[0]): void;
  mayWrite(): Promise<void>;
  note(text: string): void;
  onEnd(status: string): void;
  write: LogOutput['write'];
}

/** Over connections that say this, with the patience for two that bring nothing. */
function follow(connections: string[][], following: Partial<Following> = {}, shown: Partial<ApiClient> = {}) {
  let failures = 0;
  const patience: Patience = {
    reset() {
      failures = 0;
    },
    async wait(why) {
      failures += 1;
      if (failures > 2) throw new GaveUp(why);
    },
  };
  const nothing = async () => undefined;
  const { onStream, mayWrite = nothing, note = () => undefined, write = async () => true } = following;
  const { onEnd = () => undefined } = following;
  const api = apiOf({
    ...shown,
    patience: () => patience,
    stream: async (request) => {
      onStream?.(request);
      return { ok: true, body: said(connections.shift() ?? []) };
    },
  });
  return followLog(ID, api, { write }, mayWrite, note, onEnd);
}

/** To a key that sees a deployment with this status, of a project that is paused. */
function showing(status: string): Partial<ApiClient> {
  return { deployment: async () => ({ status }) as Deployment, project: async () => ({ status: 'paused' }) };
}

/** Of a key that may only read logs. */
function apiOf(changes: Partial<ApiClient>): ApiClient {
  const refusal = {
    ok: false as const,
    status: 403,
    isDavits: true,
    mayBeDone: false,
    message: 'it may only read logs',
  };
  return {
    patience: () => ({ reset: () => undefined, wait: async () => undefined }),
    call: async () => refusal,
    deployment: async () => null,
    project: async () => undefined,
    stream: async () => refusal,
    close: async () => undefined,
    ...changes,
  };
}

async function* said(pieces: string[]): AsyncGenerator<Uint8Array, void, undefined> {
  for (const piece of pieces) yield Buffer.from(piece);
}
