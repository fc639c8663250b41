import { existsSync, readFileSync } from 'node:fs';

/** Holds a text that is new at each boot: no other boot has it, of this machine or of another one. */
export const BOOT_ID_PATH = '/proc/sys/kernel/random/boot_id';

let known: string | undefined;

/** Which boot of which machine this is. Containers of one machine have the same. */
export function bootId(): string {
  known ??= readFileSync(BOOT_ID_PATH, 'latin1').trim();
  return known;
}

/** False in some containers, and where /proc is mounted with `subset=pid`. */
export function hasBootId(): boolean {
  return existsSync(BOOT_ID_PATH);
}
