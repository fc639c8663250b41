import { execFileSync } from 'node:child_process';
import fs, { closeSync, openSync, readFileSync } from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';

/** Limits the open files of this process until the returned function is called. */
export function limitOpenFiles(count: number): () => void {
  return limit('nofile', 'open files', count);
}

/** Limits the processes and threads of this user, unless it is root. */
export function limitProcesses(count: number): () => void {
  return limit('nproc', 'processes', count);
}

/** Limits how large this process may make a file, in bytes. */
export function limitFileSize(bytes: number): () => void {
  return limit('fsize', 'file size', bytes);
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

const { openSync: realOpen, readdirSync: realList } = fs;

/** Every open fails with this code, as on an exhausted machine, until `openAgain` is called. */
export function refuseToOpen(code: 'ENFILE' | 'ENOMEM' | 'ENOENT'): void {
  const refuse = () => {
    throw Object.assign(new Error(code), { code });
  };
  Object.assign(fs, { openSync: refuse, readdirSync: refuse });
  syncBuiltinESMExports();
}

export function openAgain(): void {
  Object.assign(fs, { openSync: realOpen, readdirSync: realList });
  syncBuiltinESMExports();
}

function limit(option: string, name: string, count: number): () => void {
  const limits = readFileSync('/proc/self/limits', 'latin1');
  const before = new RegExp(`^Max ${name} +(\\S+)`, 'm').exec(limits)?.[1] ?? '';
  setTo(String(count));
  return () => setTo(before);

  function setTo(value: string): void {
    execFileSync('prlimit', ['--pid', String(process.pid), `--${option}=${value}:`]);
  }
}
