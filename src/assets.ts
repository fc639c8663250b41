import {
  accessSync,
  closeSync,
  constants,
  existsSync,
  mkdtempSync,
  openSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { getAsset, getRawAsset, isSea } from 'node:sea';
import {
  getEnvironmentData,
  isMainThread,
  setEnvironmentData,
  Worker,
  type WorkerOptions,
} from 'node:worker_threads';
import { zstdDecompressSync } from 'node:zlib';
import packageJson from '../package.json' with { type: 'json' };
import { AppError, codeOf } from './errors.ts';
import { boundThreadMemory } from './memory.ts';

/*
 * davit runs in three forms: from src/ (Node strips the types), from build/bundle/ (one file for each kind of thread),
 * and as a single executable, in which files have no path. The differences between them are in this file;
 * scripts/build.ts is its counterpart.
 */

/** Asset files by name, with their paths in the sources. */
export const ASSET_SOURCES = { 'schema.sql': 'schema.sql', 'docs.css': 'src/http/docs.css' } as const;
type AssetName = keyof typeof ASSET_SOURCES;

/** Entry modules of the worker threads, by their path in src/. */
export const THREAD_NAMES = [
  'store/writer-thread',
  'store/checkpoint-thread',
  'deliver/dispatcher-thread',
] as const;
type ThreadName = (typeof THREAD_NAMES)[number];

export const version: string = packageJson.version;

/** The text of an asset file. */
export function assetText(name: AssetName): string {
  return form.assetText(name);
}

/** Starts a worker thread that runs the module `name`; `options` are those of `new Worker`. */
export function startThread(name: ThreadName, options: WorkerOptions = {}): Worker {
  // Unpacks the addon in the main thread, before the new thread asks for it: see unpackedAddon.
  nativeAddonPath('better_sqlite3');
  // `top -H` shows the name, and boot.ts picks the bundle to run by it.
  return form.startThread(name, { ...options, ...boundThreadMemory(name), name: basename(name) });
}

/** The command that starts another davit: pass `arguments` before those of the command line. */
export function selfCommand(): { file: string; arguments: string[] } {
  return { file: process.execPath, arguments: form.main() };
}

/** Native addons by name, with their paths in the sources. */
export const ADDON_SOURCES = {
  better_sqlite3: `node_modules/better-sqlite3/prebuilds/${process.platform}-${process.arch}.node`,
  koffi: `node_modules/@koromix/koffi-${process.platform}-${process.arch}/${process.platform}_${process.arch}/koffi.node`,
} as const;
type AddonName = keyof typeof ADDON_SOURCES;

/**
 * The path to load a native addon from; undefined where the library finds it by itself. Throws AppError `unavailable`
 * when the executable finds no directory to unpack it in.
 */
export function nativeAddonPath(name: AddonName): string | undefined {
  return form.addonPath(name);
}

/** What differs between the forms. Only functions use `import.meta`, as it is empty in the executable. */
interface Form {
  assetText(name: AssetName): string;
  startThread(name: ThreadName, options: WorkerOptions): Worker;
  /** The arguments that come between Node and those of the command line. */
  main(): string[];
  addonPath(name: AddonName): string | undefined;
}

const SOURCE: Form = {
  assetText: (name) => readFileSync(join(import.meta.dirname, '..', ASSET_SOURCES[name]), 'utf8'),
  // By default a thread loads once more what `--import` names, as test runners do.
  startThread: (name, options) =>
    new Worker(join(import.meta.dirname, `${name}.ts`), { ...options, execArgv: [] }),
  main: () => [join(import.meta.dirname, 'main.ts')],
  addonPath: () => undefined,
};

const BUNDLE: Form = {
  assetText: (name) => readFileSync(join(import.meta.dirname, name), 'utf8'),
  startThread: (name, options) => new Worker(join(import.meta.dirname, `${basename(name)}.cjs`), options),
  main: () => [join(import.meta.dirname, 'main.cjs')],
  addonPath: (name) => join(import.meta.dirname, `${name}.node`),
};

const EXECUTABLE: Form = {
  assetText: (name) => getAsset(name, 'utf8'),
  startThread: (_name, options) => new Worker(getAsset('boot.cjs', 'utf8'), { ...options, eval: true }),
  main: () => [],
  addonPath: unpackedAddon,
};

const form = isSea() ? EXECUTABLE : import.meta.filename.endsWith('.ts') ? SOURCE : BUNDLE;

/**
 * dlopen(3) needs a file, so the executable writes the addon to one and unlinks it first: nobody can replace an unlinked
 * file, and none is left behind. A kill -9 in the moment before leaves an empty one in its directory.
 *
 * All threads must load this same file. Two copies of SQLite in one process do not see each other's locks, and closing
 * a file in one drops the locks of the other (sqlite.org/howtocorrupt.html, section 2.2.1). The file descriptor stays
 * open for the life of the process.
 */
function unpackedAddon(name: AddonName): string {
  const key = `davit:addon:${name}`;
  const known = getEnvironmentData(key);
  if (typeof known === 'string') return known;
  if (!isMainThread)
    throw new Error('the addon is not unpacked yet, which the main thread does: use startThread');
  // 3.6 ms; with Node's default chunks of 16 KiB, 5.5 ms.
  const bytes = zstdDecompressSync(new Uint8Array(getRawAsset(`${name}.node`)), { chunkSize: 1024 * 1024 });
  const path = unpackAddon(name, bytes, libraryDirectories());
  setEnvironmentData(key, path);
  return path;
}

function libraryDirectories(): string[] {
  const userId = process.getuid?.() ?? 0;
  return [...new Set([tmpdir(), '/var/tmp', `/run/user/${userId}`, '/dev/shm'])];
}

/** Where an unlinked file can be opened by its file descriptor, proc_pid_fd(5). */
const OPEN_FILES = '/proc/self/fd';

/** Writes the bytes to an unlinked file, in the first of `directories` that allows execution, and returns its path. */
export function unpackAddon(name: AddonName, bytes: Uint8Array, directories: string[]): string {
  const refusals: string[] = [];
  for (const directory of directories) {
    try {
      return writeUnlinked(name, bytes, directory);
    } catch (error) {
      refusals.push(`${directory} ${codeOf(error)}`);
    }
  }
  if (!existsSync(OPEN_FILES)) {
    throw new AppError(
      'unavailable',
      `/proc does not show this process, and ${name} is loaded from there: mount /proc in the PID namespace of davit`,
    );
  }
  throw new AppError(
    'unavailable',
    `no directory to load ${name} from (${refusals.join(', ')}): set TMPDIR to one where this user may write and files may be executed`,
  );
}

function writeUnlinked(name: AddonName, bytes: Uint8Array, directory: string): string {
  const descriptor = openUnlinked(name, directory);
  try {
    writeFileSync(descriptor, bytes);
    const path = `${OPEN_FILES}/${descriptor}`;
    // Fails on a file system that is mounted noexec, access(2), where loading would fail too.
    accessSync(path, constants.X_OK);
    return path;
  } catch (error) {
    closeSync(descriptor);
    throw error;
  }
}

/** Opens it in a directory of mode 0700, as the file has a name until the directory is removed. */
function openUnlinked(name: AddonName, directory: string): number {
  const folder = mkdtempSync(join(directory, 'davit-'));
  const path = join(folder, `${name}.node`);
  try {
    return openSync(path, 'wx+', 0o700);
  } finally {
    rmSync(folder, { recursive: true });
  }
}
