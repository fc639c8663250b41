import { statSync } from 'node:fs';

/** A line of /proc/self/mountinfo by which the file system that a directory is on has this type. */
export function mountinfoLine(directory: string, type: string): string {
  const { dev } = statSync(directory);
  const device = `${(dev >> 8) & 0xfff}:${(dev & 0xff) | ((dev >> 12) & 0xfff00)}`;
  return `36 35 ${device} / /srv rw,relatime shared:1 - ${type} host:/srv rw\n`;
}
