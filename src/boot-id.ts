import { existsSync, readFileSync } from 'node:fs';

/** Which boot of the machine this is: no other has it, of this machine or of another one. */
export const BOOT_ID_PATH = '/proc/sys/kernel/random/boot_id';

let known: string | undefined;

/** What that is; containers of one machine have the same. */
export function bootId(): string {
  known ??= readFileSync(BOOT_ID_PATH, 'latin1').trim();
  return known;
}

/** False in some containers, and where /proc is mounted with `subset=pid`. */
export function hasBootId(): boolean {
  return existsSync(BOOT_ID_PATH);
}
