import { writeFileSync } from 'node:fs';
import { connect } from 'node:net';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import type { Bench } from '../measure.ts';
import { findProgram, freePort, start } from '../processes.ts';

/**
 * Debian's `webhook`, which runs a command for each request, answers with its output, and keeps no record; or why it
 * cannot take part.
 */
export async function startWebhook(
  { directory, defer }: Bench,
  command: string,
  words: readonly string[] = [],
): Promise<{ url: string } | { missing: string }> {
  const program = findProgram('webhook');
  if (program === undefined) return { missing: 'webhook is not installed: apt-get install webhook' };
  const hooks = join(directory, 'hooks.json');
  const hook = {
    id: 'run',
    'execute-command': command,
    'pass-arguments-to-command': words.map((name) => ({ source: 'string', name })),
    'include-command-output-in-response': true,
  };
  writeFileSync(hooks, JSON.stringify([hook]));
  const port = await freePort();
  const running = start(program, ['-hooks', hooks, '-ip', '127.0.0.1', '-port', String(port)], {
    stdio: 'ignore',
  });
  defer(() => running.stop());
  await untilItListens(port);
  return { url: `http://127.0.0.1:${port}/hooks/run` };
}

async function untilItListens(port: number): Promise<void> {
  for (let attempt = 1; ; attempt += 1) {
    const listens = await new Promise<boolean>((resolve) => {
      const socket = connect(port, '127.0.0.1');
      socket.on('connect', () => resolve(socket.end() !== undefined));
      socket.on('error', () => resolve(false));
    });
    if (listens) return;
    if (attempt === 100) throw new Error('webhook does not listen');
    await delay(50);
  }
}
