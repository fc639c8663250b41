import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { messageOf } from '../errors.ts';
import type { CommandContext } from './command.ts';

/**
 * Tells systemd how davit stands, if it wants to know (sd_notify(3), Type=notify). By systemd's own little program, as
 * Node has no local datagram sockets; so the unit has to say NotifyAccess=all. Never throws: whoever started davit
 * sees what comes of it.
 */
export async function notifySystemd(
  state: 'READY=1' | 'STOPPING=1' | `EXTEND_TIMEOUT_USEC=${number}`,
  { environment, terminal }: CommandContext,
): Promise<void> {
  const { NOTIFY_SOCKET, PATH = '/usr/bin:/bin' } = environment;
  if (NOTIFY_SOCKET === undefined) return;
  const child = spawn('systemd-notify', [state], {
    env: { NOTIFY_SOCKET, PATH },
    stdio: ['ignore', 'ignore', 'inherit'],
  });
  try {
    const [exitCode] = await once(child, 'exit');
    if (exitCode === 0) return;
    terminal.note(`warning: systemd was not told ${state}: systemd-notify exited with ${exitCode}`);
  } catch (error) {
    terminal.note(`warning: systemd was not told ${state}: ${messageOf(error)}`);
  }
}
