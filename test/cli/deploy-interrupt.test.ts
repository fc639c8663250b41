import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { PassThrough, type Readable } from 'node:stream';
import { text } from 'node:stream/consumers';
import t, { type Test } from 'tap';
import { createApiClient, TIMEOUTS } from '../../src/cli/api-client.ts';
import type { CommandContext } from '../../src/cli/command.ts';
import { handleInterruption } from '../../src/cli/deploy-interrupt.ts';
import { createTerminal } from '../../src/cli/terminal.ts';
import type { DeploymentId } from '../../src/domain.ts';
import { MAIN } from '../helpers/cli.ts';
import { collected } from '../helpers/collected.ts';
import { QUEUED, servedDeployments, untilFile } from '../helpers/deploy-client.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { startProxy } from '../helpers/proxy.ts';
import { type Answer, held, reset, silence, startReceiver, status } from '../helpers/receiver.ts';
import { needsTerminal } from '../helpers/terminal.ts';

const CREATED = { ...QUEUED, ref: 'slow' };

/** Some tests leave a deployment running. */
const shared = await servedDeployments(t, '--max-concurrent', '20');

t.test('a signal ends the client at once, and the deployment goes on', async (t) => {
  const { startDeploy, directory, deployments } = await shared.another(t);
  for (const [signal, exitCode] of [
    ['SIGINT', 130],
    ['SIGTERM', 143],
    ['SIGHUP', 129],
  ] as const) {
    const started = untilFile(directory, 'started');
    const client = startDeploy(['slow', '--wait']);
    await started;
    client.kill(signal);
    t.strictSame(await once(client, 'exit'), [exitCode, null]);
    const [newest] = await deployments();
    t.match(newest, { status: 'running' });
    await cancel(newest?.id, directory);
  }
});

t.test('with --cancel-on-interrupt, a signal cancels the deployment and awaits its end', async (t) => {
  const { startDeploy, deployments } = await shared.another(t);
  for (const signal of ['SIGTERM', 'SIGHUP'] as const) {
    const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt'], shared.url, 'pipe');
    if (client.stderr === null) throw new Error('its stderr is piped');
    const stderr = text(client.stderr);
    // The command may have started before the client has the answer to its request.
    await follows(client);
    client.kill(signal);
    t.strictSame(await once(client, 'exit'), [1, null]);
    t.match(
      await stderr,
      /canceling deployment dpl_\w+; a further \^C or SIGTERM leaves at once\ndeployment dpl_\w+ of slow: canceled in/,
    );
  }
  const canceled = { status: 'canceled', reason: 'user' };
  t.match(await deployments(), [canceled, canceled]);
});

t.test('once the deployment has ended, no answer to its cancellation is awaited', async (t) => {
  const { startDeploy, directory } = await shared.another(t);
  const proxy = await startProxy(t, shared.url);
  proxy.fates('pass', 'nothing'); // the cancellation
  const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt'], proxy.url, 'pipe');
  const said = collected(client, 'stderr');
  await follows(client);
  client.kill('SIGTERM');
  await said.until(/canceling deployment dpl_\w+; a further \^C or SIGTERM leaves at once\n/);
  writeFileSync(join(directory, 'end'), '');
  t.strictSame(await once(client, 'close'), [0, null]);
  await said.until(
    /leaves at once\ndeployment dpl_\w+ of slow: succeeded in \w+\nthe cancellation of .* was requested, without an answer so far\n$/,
  );
});

t.test('a failed deployment is exit code 1, also while its cancellation is not answered yet', async (t) => {
  const { startDeploy } = await shared.another(t);
  const headers = { 'Content-Type': 'text/event-stream' };
  const end = held(status(200, { headers, body: 'event: end\ndata: {"status":"failed"}\n\n' }));
  const failed = { ...CREATED, status: 'failed', reason: 'exit_code' };
  const service = await startReceiver(t, {
    answers: [
      status(201, { body: JSON.stringify(CREATED) }),
      end.answer,
      silence(),
      status(200, { body: JSON.stringify(failed) }),
    ],
  });
  const url = `http://127.0.0.1:${service.port}`;
  const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt'], url);
  const said = collected(client, 'stderr');
  for (const _ of ['created', 'followed']) await service.next();
  client.kill('SIGTERM');
  t.match(await service.next(), { path: /\/cancel$/ });
  end.release();
  t.strictSame(await once(client, 'close'), [1, null]);
  await said.until(/of slow: failed.*\nthe cancellation of .* was requested, without an answer so far\n$/);
});

t.test('once the end is known, a signal cancels nothing, and the client exits by the status', async (t) => {
  const { startDeploy } = await shared.another(t);
  for (const [signal, ended, exitCode, ...words] of [
    ['SIGTERM', 'succeeded', 0, '--cancel-on-interrupt'],
    ['SIGINT', 'failed', 1],
  ] as const) {
    const headers = { 'Content-Type': 'text/event-stream' };
    const service = await startReceiver(t, {
      answers: [
        status(201, { body: JSON.stringify(CREATED) }),
        status(200, { headers, body: `event: end\ndata: {"status":"${ended}"}\n\n` }),
        silence(),
      ],
    });
    const client = startDeploy(['slow', '--wait', ...words], `http://127.0.0.1:${service.port}`);
    const said = collected(client, 'stderr');
    for (const _ of ['created', 'followed', 'asked why']) await service.next();
    client.kill(signal);
    t.strictSame(await once(client, 'exit'), [exitCode, null]);
    await said.until(new RegExp(`\nleft; deployment dpl_1: ${ended}\n$`));
    t.equal(service.requests.length, 3);
  }
});

t.test('two signals in immediate succession count as one', async (t) => {
  const { startDeploy, directory, deployments } = await shared.another(t);
  const started = untilFile(directory, 'started');
  const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt']);
  await started;
  // Stopped meanwhile, it gets both at once, however long this process is held up in between.
  for (const signal of ['SIGSTOP', 'SIGTERM', 'SIGINT', 'SIGCONT'] as const) client.kill(signal);
  t.strictSame(await once(client, 'exit'), [1, null]);
  t.match(await deployments(), [{ status: 'canceled', reason: 'user' }]);
});

t.test('a second signal says that the cancellation was requested, and not answered', async (t) => {
  const { startDeploy } = await shared.another(t);
  const proxy = await startProxy(t, shared.url);
  proxy.fates('pass', 'nothing'); // the cancellation
  const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt'], proxy.url, 'pipe');
  const said = collected(client, 'stderr');
  await follows(client);
  client.kill('SIGTERM');
  await said.until(/canceling deployment dpl_\w+; a further \^C or SIGTERM leaves at once\n/);
  await repeatUntilEnd(client, () => client.kill('SIGINT'));
  t.strictSame([client.exitCode, client.signalCode], [130, null]);
  await said.until(/left; the cancellation of deployment dpl_\w+ was requested, without an answer so far\n$/);
});

t.test('a second signal after a refused cancellation says that the deployment goes on', async (t) => {
  const { startDeploy } = await shared.another(t);
  const error = { code: 'forbidden', message: 'it may not', request_id: 'req_1' };
  const service = await startReceiver(t, {
    answers: [
      status(201, { body: JSON.stringify(CREATED) }),
      silence(),
      status(403, { body: JSON.stringify({ error }) }),
    ],
  });
  const url = `http://127.0.0.1:${service.port}`;
  const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt'], url);
  const said = collected(client, 'stderr');
  for (const _ of ['created', 'followed']) await service.next();
  client.kill('SIGTERM');
  await said.until(/it cannot be canceled: it may not \(403 forbidden, req_1\)\n$/);
  await repeatUntilEnd(client, () => client.kill('SIGTERM'));
  await said.until(/left; deployment dpl_1 goes on\n$/);
});

t.test('a signal before the deployment exists cancels it once created, also without --wait', async (t) => {
  const { startDeploy, deployments } = await shared.another(t);
  const proxy = await startProxy(t, shared.url);
  proxy.fates('hold');
  const client = startDeploy(['slow', '--cancel-on-interrupt'], proxy.url);
  const said = collected(client, 'stderr');
  await proxy.held();
  client.kill('SIGINT');
  await said.until(
    /^the deployment is canceled as soon as it is created; a further \^C or SIGTERM leaves at once\n$/,
  );
  proxy.release();
  t.strictSame(await once(client, 'exit'), [1, null]);
  await said.until(/canceling deployment dpl_\w+;[\s\S]* of slow: canceled in \w+\n$/);
  t.match(await deployments(), [{ status: 'canceled', reason: 'user' }]);
});

t.test('a signal before anything can have been created ends the client, which creates nothing', async (t) => {
  const { startDeploy, deployments } = await shared.another(t);
  const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt'], 'http://127.0.0.1:1');
  const said = collected(client, 'stderr');
  await said.until(/cannot be reached \(ECONNREFUSED\)/);
  client.kill('SIGTERM');
  t.strictSame(await once(client, 'exit'), [143, null]);
  await said.until(/left; this created no deployment\n$/);
  t.strictSame(await deployments(), []);
});

t.test("after a proxy's 503, the deployment may exist, and a signal does not end the client", async (t) => {
  const { startDeploy } = await shared.another(t);
  const { port } = await startReceiver(t, { answers: [status(503, { body: 'connection termination' })] });
  const client = startDeploy(['slow', '--cancel-on-interrupt'], `http://127.0.0.1:${port}`);
  const said = collected(client, 'stderr');
  await said.until(/answers 503: trying again/);
  client.kill('SIGTERM');
  await said.until(
    /the deployment is canceled as soon as it is created; a further \^C or SIGTERM leaves at once\n/,
  );
  await repeatUntilEnd(client, () => client.kill('SIGTERM'));
  await said.until(
    /left; the deployment may have been created, and is not canceled: repeat with --idempotency-key \S+ to get/,
  );
});

t.test('a cancellation that was promised is taken back when deploy is refused', async (t) => {
  const noBackend = status(404, { body: 'no backend' });
  const { client, said } = await interruptedTry(t, status(502, { body: 'bad gateway' }), noBackend);
  t.strictSame(await once(client, 'exit'), [1, null]);
  await said.until(
    /error: .* answered with 404, [^;]*; the deployment may have been created, and is not canceled: /,
  );
});

t.test('a key that may not follow the deployment still cancels it', async (t) => {
  const error = { code: 'forbidden', message: 'it may not', request_id: 'req_1' };
  const forbidden = status(403, { body: JSON.stringify({ error }) });
  const canceled = held(status(202, { body: JSON.stringify({ ...CREATED, status: 'canceled' }) }));
  const { client, said, service } = await interruptedTry(
    t,
    status(201, { body: JSON.stringify(CREATED) }),
    (response, received) =>
      (received.path.endsWith('/cancel') ? canceled.answer : forbidden)(response, received),
  );
  for (const _ of ['canceled', 'followed', 'waited']) await service.next();
  canceled.release();
  t.strictSame(await once(client, 'exit'), [1, null]);
  await said.until(
    /error: dpl_1 cannot be followed: it may not \(403 .*\); the cancellation of deployment dpl_1 was requested\n$/,
  );
});

t.test('a signal during a try that surely creates nothing ends the client after that try', async (t) => {
  const error = { code: 'unavailable', message: 'the service is stopping', request_id: 'req_1' };
  const stopping = status(503, { body: JSON.stringify({ error }) });
  const { client, said, service } = await interruptedTry(t, stopping);
  t.strictSame(await once(client, 'exit'), [143, null]);
  await said.until(/\nleft; this created no deployment\n$/);
  t.equal(service.requests.length, 1);
});

t.test('a client interrupted before the answer says how to find the deployment again', async (t) => {
  const { startDeploy, deploy, deployments } = await shared.another(t);
  const proxy = await startProxy(t, shared.url);
  proxy.fates('hold');
  const client = startDeploy(['good'], proxy.url);
  const said = collected(client, 'stderr');
  await proxy.held();
  client.kill('SIGINT');
  t.strictSame(await once(client, 'exit'), [130, null]);
  const advice =
    /^left; the deployment may have been created: repeat with --idempotency-key (\S+) to get its id\n$/;
  const [, key = ''] = advice.exec(await said.until(advice)) ?? [];
  const { stdout } = await deploy(['good', '--idempotency-key', key]);
  t.match(await deployments(), [{ id: stdout.trim() }]);
  t.equal((await deployments()).length, 1);
});

t.test('on a terminal, ^C asks whether to cancel the deployment', needsTerminal, async (t) => {
  const { directory, deployments, env, key, project } = await shared.another(t);
  const deployOnTerminal = async () => {
    const started = untilFile(directory, 'started');
    const words = [process.execPath, MAIN, 'deploy', project, 'slow', '--wait']
      .map((word) => `'${word}'`)
      .join(' ');
    const terminal = spawn('script', ['--quiet', '--return', '--command', `exec ${words}`, '/dev/null'], {
      cwd: directory,
      env: { ...env, TERM: 'xterm' },
      stdio: ['pipe', 'pipe', 'inherit'],
    });
    t.teardown(() => terminal.kill('SIGKILL'));
    terminal.stdin.on('error', () => undefined); // it may end while ^C is pressed once more
    const shown = collected(terminal);
    await started;
    await shown.until(/begun/);
    terminal.stdin.write('\u0003');
    await shown.until(/Cancel deployment dpl_\w+\? \[y\/N\]/);
    return { terminal, shown };
  };

  const yes = await deployOnTerminal();
  yes.terminal.stdin.write('Yes\n');
  t.strictSame(await once(yes.terminal, 'exit'), [1, null]);
  await yes.shown.until(/of slow: canceled in/);

  const no = await deployOnTerminal();
  no.terminal.stdin.write('n\n');
  await no.shown.until(/the deployment goes on; \^C again stops following it/);
  t.match(await deployments(), [{ status: 'running' }, { status: 'canceled' }]);
  await repeatUntilEnd(no.terminal, () => no.terminal.stdin.write('\u0003'));
  t.equal(no.terminal.exitCode, 130);
  const [newest] = await deployments();
  t.match(newest, { status: 'running' });

  await cancel(newest?.id, directory);
  const twice = await deployOnTerminal();
  await repeatUntilEnd(twice.terminal, () => twice.terminal.stdin.write('\u0003'));
  t.equal(twice.terminal.exitCode, 130);
  await twice.shown.until(/left; deployment dpl_\w+ goes on/);

  const [left] = await deployments();
  await cancel(left?.id, directory);
  const later = await deployOnTerminal();
  writeFileSync(join(directory, 'more'), '');
  const [asked] = await deployments();
  await untilLogged(`${shared.url}/v2/deployments/${asked?.id}/logs`, key, 'more');
  later.terminal.stdin.write('n\n');
  await later.shown.until(/Cancel deployment \S+ \[y\/N\] n\s+the deployment goes on; [^\n]*\n[^\n]*more/);
  await cancel(asked?.id, directory);
  t.strictSame(await once(later.terminal, 'exit'), [1, null]);
  await later.shown.until(/of slow: canceled in/);

  const ended = await deployOnTerminal();
  const [endedOne] = await deployments();
  await cancel(endedOne?.id, directory);
  t.strictSame(
    await once(ended.terminal, 'exit'),
    [1, null],
    'an unanswered question does not delay the exit',
  );
  await ended.shown.until(/of slow: canceled in/);

  const meanwhile = await deployOnTerminal();
  writeFileSync(join(directory, 'more'), '');
  const [last] = await deployments();
  await untilLogged(`${shared.url}/v2/deployments/${last?.id}/logs`, key, 'more');
  writeFileSync(join(directory, 'end'), '');
  t.strictSame(await once(meanwhile.terminal, 'exit'), [0, null], 'nor does it if the log waits for it');
  await meanwhile.shown.until(/\[y\/N\] \s+more\s+deployment \S+ of slow: succeeded in/);
  for (const name of ['started', 'end']) rmSync(join(directory, name));
});

t.test('a terminal that hangs up while the question stands ends the client', needsTerminal, async (t) => {
  const { directory, deployments, env, project } = await shared.another(t);
  const started = untilFile(directory, 'started');
  const words = [process.execPath, MAIN, 'deploy', project, 'slow', '--wait'];
  const command = `exec ${words.map((word) => `'${word}'`).join(' ')}`;
  const terminal = spawn('script', ['--quiet', '--command', command, '/dev/null'], {
    cwd: directory,
    env: { ...env, TERM: 'xterm' },
    stdio: ['pipe', 'pipe', 'inherit', 'pipe'],
  });
  t.teardown(() => terminal.kill('SIGKILL'));
  const shown = collected(terminal);
  // The client has the other end of this, too.
  const client = terminal.stdio[3] as Readable;
  const left = once(client.resume(), 'close');
  await started;
  await shown.until(/begun/);
  terminal.stdin?.write('\u0003');
  await shown.until(/Cancel deployment dpl_\w+\? \[y\/N\]/);
  terminal.kill('SIGKILL');
  await left;
  const [newest] = await deployments();
  t.match(newest, { status: 'running' });
});

t.test('once the question is answered, a ^C is another one, however soon it comes', async (t) => {
  const { interrupt, exits, stdin, interruption } = await handledHere(t, { wait: true });
  interrupt('SIGINT');
  interrupt('SIGINT');
  t.strictSame(exits, [], 'at once, it is the same one');
  stdin.write('n\n');
  await interruption.answered();
  interrupt('SIGINT');
  t.strictSame(exits, [130]);
});

t.test(
  'a ^C without --wait asks nothing, and one before the first try ends the client at once',
  async (t) => {
    const created = await handledHere(t, {});
    created.interrupt('SIGINT');
    t.strictSame(created.exits, [130]);
    const early = await handledHere(t, { cancelOnInterrupt: true, wait: true }, silence(), false);
    early.interrupt('SIGINT');
    t.strictSame(early.exits, [130]);
    t.equal(early.interruption.isCanceling(), false);
  },
);

t.test('a further SIGHUP does not cut off a cancellation', async (t) => {
  const { interrupt, exits, service, effects } = await handledHere(t, { cancelOnInterrupt: true });
  interrupt('SIGHUP');
  await service.next();
  // A shell passes it on to its jobs when its terminal hangs up, and again when it ends.
  effects.advance(500);
  interrupt('SIGHUP');
  t.strictSame(exits, []);
  effects.advance(500);
  interrupt('SIGTERM');
  t.strictSame(exits, [143]);
});

t.test('a further SIGHUP ends the client if the cancellation was refused', async (t) => {
  const refused = refusal(403, 'forbidden');
  const { interrupt, exits, effects, interruption } = await handledHere(
    t,
    { cancelOnInterrupt: true },
    refused,
  );
  interrupt('SIGHUP');
  await interruption.settled();
  effects.advance(500);
  interrupt('SIGHUP');
  t.strictSame(exits, [129]);
});

t.test('a cancellation of a deployment that has just ended is not taken for a refused one', async (t) => {
  const ended = refusal(409, 'conflict');
  const { interrupt, interruption } = await handledHere(t, { cancelOnInterrupt: true }, ended);
  interrupt('SIGTERM');
  await interruption.settled();
  t.equal(interruption.whatIsLeft(), 'the cancellation of deployment dpl_1 was requested');
});

t.test(
  'if the connection is lost during a cancellation, davit says so, and does not wait for an answer',
  async (t) => {
    const { interrupt, interruption, said } = await handledHere(t, { cancelOnInterrupt: true }, reset());
    interrupt('SIGTERM');
    await interruption.settled();
    t.match(said(), /\nit cannot be canceled: .* \(ECONNRESET\)/);
    t.equal(interruption.isOpen(), false);
  },
);

function refusal(statusCode: number, code: string): Answer {
  const error = { code, message: 'no', request_id: 'req_1' };
  return status(statusCode, { body: JSON.stringify({ error }) });
}

/** The handling of signals in this process, mostly with a deployment that is created, and a clock that stands still. */
async function handledHere(
  t: Test,
  options: { cancelOnInterrupt?: boolean; wait?: boolean },
  answer = silence(),
  isCreated = true,
) {
  const service = await startReceiver(t, { answers: [answer] });
  const stream = () => Object.assign(new PassThrough(), { isTTY: true });
  const [stdin, stdout, stderr] = [stream(), stream(), stream()];
  const listeners = new Set<(name: Interrupting) => void>();
  const exits: number[] = [];
  const effects = fakeEffects();
  const context: CommandContext = {
    terminal: createTerminal({ stdin, stdout, stderr }, () => undefined),
    commandLine: [],
    environment: {},
    startEnvironment: {},
    effects,
    onSignal(_names, listener) {
      listeners.add(listener as (name: Interrupting) => void);
      return () => listeners.delete(listener as (name: Interrupting) => void);
    },
    exit: (code) => exits.push(code),
    exitWithThreads: () => undefined,
    leaveDirectory: () => undefined,
  };
  const api = createApiClient(
    {
      baseUrl: new URL(service.url),
      key: 'key',
      caPem: null,
      retryForMs: 0,
      version: '0.0.0',
      timeouts: TIMEOUTS,
    },
    context,
  );
  t.teardown(() => api.close());
  const interruption = handleInterruption(api, 'job', options, context);
  if (isCreated) {
    interruption.tried(true);
    interruption.created('dpl_1' as DeploymentId);
  }
  const interrupt = (signal: Interrupting) => {
    for (const listen of listeners) listen(signal);
  };
  const said = () => String(stderr.read());
  return { interrupt, exits, stdin, interruption, service, effects, said };
}

type Interrupting = 'SIGINT' | 'SIGTERM' | 'SIGHUP';

/** Resolves once it prints the log. Its next request is sent over its first connection, which before was not free yet. */
async function follows(client: ChildProcess): Promise<void> {
  await collected(client).until(/begun/);
}

/** Signals until the child has ended: what comes at once after the first is the same signal. */
async function repeatUntilEnd(child: ChildProcess, signal: () => void): Promise<void> {
  const ended = once(child, 'exit');
  const again = setInterval(signal, 20);
  await ended;
  clearInterval(again);
}

/** Resolves when the log has this. */
async function untilLogged(url: string, key: string, text: string): Promise<void> {
  const headers = { Authorization: `Bearer ${key}`, Accept: 'text/event-stream' };
  const { body } = await fetch(url, { headers });
  let logged = '';
  for await (const piece of body ?? []) {
    logged += Buffer.from(piece).toString();
    if (logged.includes(text)) return;
  }
}

/** Cancels a deployment of `slow` and removes the file that says that it started. */
async function cancel(id: string | undefined, directory: string): Promise<void> {
  rmSync(join(directory, 'started'));
  await shared.davit(['admin', 'deployment', 'cancel', id ?? '']);
}

/** A client that gets SIGTERM while its first try is under way; that is answered with `first`, and later ones as given. */
async function interruptedTry(t: Test, first: Answer, ...later: Answer[]) {
  const { startDeploy } = await shared.another(t);
  const { answer, release } = held(first);
  const service = await startReceiver(t, { answers: [answer, ...later] });
  const url = `http://127.0.0.1:${service.port}`;
  const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt'], url);
  const said = collected(client, 'stderr');
  await service.next();
  client.kill('SIGTERM');
  await said.until(
    /^the deployment is canceled as soon as it is created; a further \^C or SIGTERM leaves at once\n$/,
  );
  release();
  return { client, said, service };
}
