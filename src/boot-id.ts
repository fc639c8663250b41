import { existsSync, readFileSync } from 'node:fs';

/** The kernel generates a new UUID at each boot. */
export const BOOT_ID_PATH = '/proc/sys/kernel/random/boot_id';

let known: string | undefined;

/** Identifies the machine and its current boot. Containers of one machine share it, as a rule. */
export function bootId(): string {
  known ??= readFileSync(BOOT_ID_PATH, 'latin1').trim();
  return known;
}

/** Whether the boot id can be read: not in some containers, nor where /proc is mounted with `subset=pid`. */
export function hasBootId(): boolean {
  return existsSync(BOOT_ID_PATH);
}
