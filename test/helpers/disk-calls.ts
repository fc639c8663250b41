import fs, { readlinkSync } from 'node:fs';
import { syncBuiltinESMExports } from 'node:module';
import { basename } from 'node:path';

/** What Node's calls are named here, and which of their arguments are shown. */
const RECORDED = {
  fsyncSync: (descriptor: number) => `sync ${basename(readlinkSync(`/proc/self/fd/${descriptor}`))}`,
  linkSync: (from: string, to: string) => `link ${basename(from)} ${basename(to)}`,
  renameSync: (from: string, to: string) => `rename ${basename(from)} ${basename(to)}`,
  rmSync: (path: string) => `remove ${basename(path)}`,
};

/**
 * What `action` does to names and has written to the disk, in order: a power cut may come between any two. `failing`
 * has one of the calls fail with a code, as other file systems do.
 */
export function diskCallsOf(
  action: () => void,
  failing: Partial<Record<keyof typeof RECORDED, string>> = {},
): string[] {
  const calls: string[] = [];
  const { fsyncSync, linkSync, renameSync, rmSync } = fs;
  const real = { fsyncSync, linkSync, renameSync, rmSync };
  for (const name of Object.keys(RECORDED) as (keyof typeof RECORDED)[]) {
    const [call, shown] = [real[name], RECORDED[name]] as [
      (...words: unknown[]) => void,
      (...words: unknown[]) => string,
    ];
    Object.assign(fs, {
      [name](...words: unknown[]) {
        calls.push(shown(...words));
        const code = failing[name];
        if (code !== undefined) throw Object.assign(new Error(code), { code });
        call(...words);
      },
    });
  }
  syncBuiltinESMExports();
  try {
    action();
  } finally {
    Object.assign(fs, real);
    syncBuiltinESMExports();
  }
  return calls;
}
