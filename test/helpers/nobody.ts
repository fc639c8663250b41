import { statSync } from 'node:fs';

export const NOBODY = 65_534;

/**
 * For tests in which root makes what is another user's, or acts as one: whoever is not root may not, nor may root
 * everywhere. `paths`: what that user must be able to come to.
 */
export function ifMayBeNobody(...paths: string[]): { skip?: string } {
  if (process.getuid?.() !== 0) return { skip: 'needs root' };
  try {
    process.seteuid?.(NOBODY);
    for (const path of paths) statSync(path);
    return {};
  } catch (error) {
    return { skip: String(error) };
  } finally {
    process.seteuid?.(0);
  }
}
