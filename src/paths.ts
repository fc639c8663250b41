import { accessSync, readFileSync, readlinkSync, realpathSync, type Stats, statSync } from 'node:fs';
import { basename, dirname, isAbsolute, join, resolve } from 'node:path';
import { codeOf } from './errors.ts';

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

/** Resolves symbolic links, even when the file does not exist yet. */
export function realPath(path: string): string {
  try {
    return realOf(path);
  } catch (error) {
    return (codeOf(error) === 'ENOENT' ? realPathOfMissing(path) : undefined) ?? absolutePath(path);
  }
}

/** Not `realpathSync` itself, which resolves `link/..` as `resolve` does. */
const realOf = realpathSync.native;

/** Undefined: its directory is missing too. */
function realPathOfMissing(path: string): string | undefined {
  let directory: string;
  try {
    directory = realOf(dirname(path));
  } catch {
    return undefined;
  }
  const target = linkTarget(path);
  if (target === undefined) return join(directory, basename(path));
  return realPath(pathIn(directory, target));
}

function linkTarget(path: string): string | undefined {
  try {
    return readlinkSync(path);
  } catch {
    return undefined;
  }
}

/** Undefined where there is no file, or none that can be reached, for instance in a directory without permission. */
export function statusOf(file: string): Stats | undefined {
  try {
    return statSync(file);
  } catch {
    return undefined;
  }
}

/** Empty where there is no file, or it cannot be read. */
export function textOf(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch {
    return '';
  }
}

/** Whether this user may use a file or a directory so, access(2), and it is there. */
export function isAccessible(path: string, mode: number): boolean {
  try {
    accessSync(path, mode);
    return true;
  } catch {
    return false;
  }
}

/** The same as far as permissions go: it may be on a read-only disk, or missing. */
export function isPermitted(path: string, mode: number): boolean {
  try {
    accessSync(path, mode);
    return true;
  } catch (error) {
    return codeOf(error) !== 'EACCES';
  }
}

/** The permissions in a mode, as chmod(1) takes them. */
export function octal(mode: number): string {
  return (mode & 0o7777).toString(8);
}
