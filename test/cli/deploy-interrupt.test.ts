import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { rmSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import t from 'tap';
import { MAIN, run } from '../helpers/cli.ts';
import { runningDeployments, untilFile } from '../helpers/deploy-client.ts';
import { needsTerminal } from '../helpers/terminal.ts';

t.test('a signal leaves at once, and the deployment goes on', async (t) => {
  const { startDeploy, directory, deployments } = await runningDeployments(t);
  for (const [signal, exitCode] of [
    ['SIGINT', 130],
    ['SIGTERM', 143],
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

t.test('with --cancel-on-interrupt it is canceled, and waited for', async (t) => {
  const { startDeploy, directory, deployments } = await runningDeployments(t);
  const started = untilFile(directory, 'started');
  const client = startDeploy(['slow', '--wait', '--cancel-on-interrupt']);
  if (client.stderr === null) throw new Error('its stderr is piped');
  const stderr = text(client.stderr);
  await started;
  client.kill('SIGTERM');
  t.strictSame(await once(client, 'exit'), [1, null]);
  t.match(
    await stderr,
    /canceling deployment dpl_\w+; a second signal leaves at once\ndeployment dpl_\w+ of slow: canceled in/,
  );
  t.match(await deployments(), [{ status: 'canceled', reason: 'user' }]);
});

t.test('on a terminal ^C asks', needsTerminal, async (t) => {
  const { directory, deployments, env, project } = await runningDeployments(t);
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
    const shown = collect(terminal);
    await started;
    await shown.until(/begun/);
    terminal.stdin.write('\u0003');
    await shown.until(/Cancel deployment dpl_\w+\? \[y\/N\]/);
    return { terminal, shown };
  };

  const yes = await deployOnTerminal();
  yes.terminal.stdin.write('y\n');
  t.strictSame(await once(yes.terminal, 'exit'), [1, null]);
  await yes.shown.until(/of slow: canceled in/);

  const no = await deployOnTerminal();
  no.terminal.stdin.write('n\n');
  await no.shown.until(/it goes on; \^C again leaves it alone/);
  t.match(await deployments(), [{ status: 'running' }, { status: 'canceled' }]);
  no.terminal.stdin.write('\u0003');
  t.strictSame(await once(no.terminal, 'exit'), [130, null]);
  const [newest] = await deployments();
  t.match(newest, { status: 'running' });

  await cancel(newest?.id, directory);
  const twice = await deployOnTerminal();
  twice.terminal.stdin.write('\u0003');
  t.strictSame(await once(twice.terminal, 'exit'), [130, null]);
  await twice.shown.until(/left; deployment dpl_\w+ goes on/);
});

/** Cancels a deployment of `slow` and forgets that it began. */
async function cancel(id: string | undefined, directory: string): Promise<void> {
  rmSync(join(directory, 'started'));
  await run(['admin', 'deployment', 'cancel', id ?? ''], { cwd: directory });
}

function collect(child: ChildProcess) {
  let shown = '';
  const waiting = new Set<() => void>();
  child.stdout?.setEncoding('utf8').on('data', (piece: string) => {
    shown += piece;
    for (const look of waiting) look();
  });
  return {
    until: (pattern: RegExp) =>
      new Promise<void>((resolve, reject) => {
        const look = () => {
          if (!pattern.test(shown)) return;
          waiting.delete(look);
          resolve();
        };
        waiting.add(look);
        child.once('close', () =>
          pattern.test(shown) ? resolve() : reject(new Error(`not shown: ${shown}`)),
        );
        look();
      }),
  };
}
