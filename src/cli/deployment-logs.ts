import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Command } from 'commander';
import { type Deployment, isTerminal } from '../domain.ts';
import { delay } from '../effects.ts';
import { option } from '../options.ts';
import { endsLine } from '../store/logs.ts';
import type { Store } from '../store/store.ts';
import { type CommandContext, EXIT_CODE_OF_SIGNAL, explain, stayAlive } from './command.ts';
import { withStore } from './database-file.ts';
import { deploymentLine, obstacleOf, REPORTED_ELSEWHERE } from './deployment-status.ts';
import { createLogOutput } from './log-output.ts';
import { DEPLOYMENT_ARGUMENT, resolveDeployment } from './names.ts';
import { isServed } from './serving.ts';

/** Too short for a reader to notice; each poll costs 10 µs. */
const POLL_EVERY_MS = 200;

/** `davit admin deployment logs`. */
export function defineLogs(command: Command, context: CommandContext): void {
  explain(
    command.summary('what its command printed'),
    'Prints the log byte for byte. The middle of a long log is left out, and a line says so. On a terminal, control ' +
      'characters are shown escaped, so that a log cannot move the cursor or change the title; colours are kept.',
    ['davit admin deployment logs dpl_…', 'davit admin deployment logs dpl_… -f'],
  )
    .argument(...DEPLOYMENT_ARGUMENT)
    .addOption(option('-f, --follow', 'go on until the deployment has ended'))
    .action((text: string, { follow = false }: { follow?: boolean }) =>
      withStore(command, context, 'refuse', async (store) => {
        const deployment = resolveDeployment(store, text);
        if (!follow) return await showLog(deployment, store, context);
        const reason = whyItMayTake(deployment, store, await isServed(command));
        if (reason !== undefined) context.terminal.note(`note: ${reason}`);
        await showLogToEnd(deployment, store, context);
      }),
    );
}

async function showLog(
  { id, status, log_bytes }: Deployment,
  store: Store,
  { terminal }: CommandContext,
): Promise<void> {
  const output = createLogOutput(terminal);
  for (const bytes of store.reads.logs.text(id, 0, log_bytes)) {
    if (!(await output.write(bytes))) return;
  }
  await output.end();
  if (log_bytes === 0) terminal.note(`nothing was printed${isTerminal(status) ? '' : ' yet'}`);
}

/** Why a deployment may not print anything for a while; undefined: it should. It may have ended since it was read. */
export function whyItMayTake(deployment: Deployment, store: Store, served: boolean): string | undefined {
  const { reads } = store;
  const { id, status, queue_position, project_id } = deployment;
  if (status === 'queued') {
    const obstacle = obstacleOf(deployment, reads.projects.existing(project_id), served);
    return (
      obstacle ?? (queue_position === 1 ? undefined : `it is number ${queue_position} in its project's queue`)
    );
  }
  const isOurs = reads.deployments.running().some((running) => running.id === id);
  // It was running before that query, too: if it has not ended, it is not one that davit runs.
  if (!isOurs && isTerminal(resolveDeployment(store, id).status)) return undefined;
  if (!isOurs) return REPORTED_ELSEWHERE;
  return served ? undefined : "no service is running: 'davit serve' ends what is left of it";
}

async function showLogToEnd({ id }: Deployment, store: Store, context: CommandContext): Promise<void> {
  using _ = stayAlive();
  const { effects, terminal } = context;
  const output = createLogOutput(terminal);
  let midLine = false;
  for (let at = 0; ; ) {
    // Read first: what is committed after it makes the loop below end.
    const version = store.reads.instance.dataVersion();
    const deployment = resolveDeployment(store, id);
    for (const bytes of store.reads.logs.text(id, at, deployment.log_bytes, midLine)) {
      if (!(await output.write(bytes))) return;
      midLine = !endsLine(bytes);
    }
    at = deployment.log_bytes;
    if (isTerminal(deployment.status)) {
      await output.end();
      terminal.note(deploymentLine(deployment));
      return;
    }
    const stopListening = closeAtSignal(store, context);
    while (store.reads.instance.dataVersion() === version) await delay(POLL_EVERY_MS, effects);
    // A signal that has come since the event loop looked for any would be lost with its listener.
    await nextTurn();
    stopListening();
  }
}

/**
 * Closes the file at a signal: as the last process that has it open, this removes its -wal. Then sends the signal again, to
 * which nothing listens any more: a shell that waits for davit must see that a signal ended it. It does not end the first
 * process of a PID namespace, which exits instead.
 */
function closeAtSignal(store: Store, { onSignal, exit }: CommandContext): () => void {
  const stopListening = onSignal(['SIGINT', 'SIGTERM', 'SIGHUP'], (signal) => {
    void store.close();
    stopListening();
    process.kill(process.pid, signal);
    exit(EXIT_CODE_OF_SIGNAL[signal]);
  });
  return stopListening;
}
