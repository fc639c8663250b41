import { isAbsolute, resolve } from 'node:path';

/** A path that may be relative to `directory`, without `./` at its beginning, and with each `..` left as it is. */
export function pathIn(directory: string, path: string): string {
  if (isAbsolute(path)) return path;
  return `${directory.replace(/\/$/, '')}/${path.replace(/^(?:\.\/+)+/, '')}`;
}

/** An absolute path to the same file. To `resolve`, `link/..` is where the link is, not above where it leads. */
export function absolutePath(path: string): string {
  const parts = path.split('/');
  const firstName = parts.findIndex((part) => !['', '.', '..'].includes(part));
  const goesUp = firstName !== -1 && parts.lastIndexOf('..') > firstName;
  if (!goesUp) return resolve(path);
  return isAbsolute(path) ? path : `${process.cwd()}/${path}`;
}

/** Whether a path can only be that of a directory. `absolutePath` makes one of it that could be that of a file. */
export function namesDirectory(path: string): boolean {
  return /\/\.?$/.test(path);
}
