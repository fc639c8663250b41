import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { messageOf } from '../errors.ts';
import type { CommandContext } from './command.ts';

/**
 * Tells systemd the state of davit, if NOTIFY_SOCKET is set: sd_notify(3), Type=notify. Calls systemd-notify, as Node
 * has no Unix datagram sockets; the unit therefore needs NotifyAccess=all. Never throws, only warns.
 */
export async function notifySystemd(
  state: 'READY=1' | 'STOPPING=1' | `EXTEND_TIMEOUT_USEC=${number}`,
  { environment, terminal }: CommandContext,
): Promise<void> {
  const { NOTIFY_SOCKET, PATH = '/usr/bin:/bin' } = environment;
  if (NOTIFY_SOCKET === undefined) return;
  try {
    // Throws at once for some causes, such as a file among the directories of PATH.
    const child = spawn('systemd-notify', [state], {
      env: { NOTIFY_SOCKET, PATH },
      stdio: ['ignore', 'ignore', 'inherit'],
    });
    const [exitCode, signal] = await once(child, 'exit');
    if (exitCode === 0) return;
    const how = signal === null ? `exited with ${exitCode}` : `was ended by ${signal}`;
    terminal.note(`warning: systemd was not told ${state}: systemd-notify ${how}`);
  } catch (error) {
    terminal.note(`warning: systemd was not told ${state}: ${messageOf(error)}`);
  }
}
