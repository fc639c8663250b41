import { readFileSync } from 'node:fs';

/** As `sudo -u` takes it: a name, or `#` and a number. */
export function nameOfUser(uid: number): string {
  const entries = readText('/etc/passwd').split('\n');
  const [name] = entries.map((entry) => entry.split(':')).find(([, , id]) => id === String(uid)) ?? [];
  return name ?? `'#${uid}'`;
}

function readText(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}
