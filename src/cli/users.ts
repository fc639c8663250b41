import { textOf } from '../paths.ts';

/** As `sudo -u` takes it: a name, or `#` and a number. */
export function nameOfUser(uid: number): string {
  const entries = textOf('/etc/passwd').split('\n');
  const [name] = entries.map((entry) => entry.split(':')).find(([, , id]) => id === String(uid)) ?? [];
  return name ?? `'#${uid}'`;
}
