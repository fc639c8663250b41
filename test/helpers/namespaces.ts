import { spawnSync } from 'node:child_process';

/** Options of unshare(1) for a PID namespace that ends with its parent. */
export const OWN_PROCESSES = ['--map-root-user', '--pid', '--fork', '--kill-child', '--mount-proc'];

/** For tests that need a PID namespace with a /proc of its own, as a container has it. */
export const ifMayUnshare =
  spawnSync('unshare', [...OWN_PROCESSES, 'true']).status === 0
    ? {}
    : { skip: 'PID namespaces with a /proc of their own are not allowed here' };

/** Runs a program as the first process of such a namespace. */
export function runInNamespace(...words: string[]) {
  return spawnSync('unshare', [...OWN_PROCESSES, ...words], { encoding: 'utf8' });
}
