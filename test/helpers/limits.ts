import { execFileSync } from 'node:child_process';
import { closeSync, openSync, readFileSync } from 'node:fs';

/** So many files may this process open from now on, at most, until the returned function is called. */
export function limitOpenFiles(count: number): () => void {
  const before = /^Max open files +(\S+)/m.exec(readFileSync('/proc/self/limits', 'latin1'))?.[1] ?? '';
  setLimit(String(count));
  return () => setLimit(before);
}

/** No file can be opened from now on, until the returned function is called. */
export function useUpFiles(): () => void {
  const lift = limitOpenFiles(256);
  const held: number[] = [];
  try {
    for (;;) held.push(openSync('/dev/null', 'r'));
  } catch {
    return () => {
      for (const descriptor of held) closeSync(descriptor);
      lift();
    };
  }
}

function setLimit(limit: string): void {
  execFileSync('prlimit', ['--pid', String(process.pid), `--nofile=${limit}:`]);
}
