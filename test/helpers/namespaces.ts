import { spawnSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';

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

/** Options of unshare(1) for a network with nothing but a loopback, and mounts that nobody else sees. */
const OWN_NETWORK = ['--map-root-user', '--mount', '--net'];

/** For tests that need a DNS server, or an address, of their own. */
export const ifMayServeDns =
  spawnSync('unshare', [...OWN_NETWORK, 'ip', 'link', 'set', 'lo', 'up']).status === 0
    ? {}
    : { skip: 'a network of its own with a loopback is not allowed here' };

/** Runs a program where 127.0.0.1 is the only DNS server, and gives what it printed. */
export function runWithOwnDns(directory: string, hosts: string, ...words: string[]) {
  writeFileSync(join(directory, 'resolv.conf'), 'nameserver 127.0.0.1\n');
  writeFileSync(join(directory, 'hosts'), hosts);
  const script = `
    ip link set lo up
    mount --bind "$0/resolv.conf" /etc/resolv.conf
    mount --bind "$0/hosts" /etc/hosts
    exec "$@"`;
  const shell = ['sh', '-euc', script, directory, ...words];
  return spawnSync('unshare', [...OWN_NETWORK, ...shell], { encoding: 'utf8' });
}

/** Runs a program on a machine with this address besides those of its loopback, and gives what it printed. */
export function runWithAddress(address: string, ...words: string[]) {
  const script = 'ip link set lo up; ip addr add "$0/32" dev lo; exec "$@"';
  return spawnSync('unshare', [...OWN_NETWORK, 'sh', '-euc', script, address, ...words], {
    encoding: 'utf8',
  });
}
