import { codeOf } from '../errors.ts';

/**
 * `target` is a process id, or the negative id of a group. One that is gone or another user's is passed over. Returns
 * whether this user may signal it.
 */
export function signal(target: number, name: 'SIGTERM' | 'SIGCONT' | 'SIGSTOP' | 'SIGKILL'): boolean {
  try {
    process.kill(target, name);
    return true;
  } catch (error) {
    const code = codeOf(error);
    if (code !== 'ESRCH' && code !== 'EPERM' && code !== 'EACCES') throw error;
    return code === 'ESRCH';
  }
}

/** Whether there is a process with this id, or in the group with this negative id. */
export function exists(target: number): boolean {
  try {
    return process.kill(target, 0);
  } catch (error) {
    return codeOf(error) !== 'ESRCH';
  }
}
