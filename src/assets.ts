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
 * davit runs from three places: from src/ (Node strips the types), from build/bundle/ (one file for the
 * main thread and one for each other), and as one executable, in which nothing has a path. What differs
 * between them stands here; scripts/build.ts is its counterpart.
 */

/** Files that go with the program, by name: where they lie in the sources. */
export const ASSET_SOURCES = { 'schema.sql': 'schema.sql', 'docs.css': 'src/http/docs.css' } as const;
type AssetName = keyof typeof ASSET_SOURCES;

/** Modules that run in a thread of their own, by their path in src/. */
export const THREAD_NAMES = [
  'store/writer-thread',
  'store/checkpoint-thread',
  'deliver/dispatcher-thread',
] as const;
type ThreadName = (typeof THREAD_NAMES)[number];

export const version: string = packageJson.version;

/** The text of a file that goes with the program. */
export function assetText(name: AssetName): string {
  return here.assetText(name);
}

/** A thread that runs `name`; takes what `new Worker` takes. */
export function startThread(name: ThreadName, options: WorkerOptions = {}): Worker {
  // Before the thread looks for it: see unpackedAddon.
  nativeAddonPath('better_sqlite3');
  // By its name top -H shows it, and boot.ts knows what to run.
  return here.startThread(name, { ...options, ...boundThreadMemory(name), name: basename(name) });
}

/** How to start davit once more: `arguments` come before those of the command line. */
export function selfCommand(): { file: string; arguments: string[] } {
  return { file: process.execPath, arguments: here.main() };
}

/** The native parts of libraries, by name: where they lie in the sources. */
export const ADDON_SOURCES = {
  better_sqlite3: `node_modules/better-sqlite3/prebuilds/${process.platform}-${process.arch}.node`,
  koffi: `node_modules/@koromix/koffi-${process.platform}-${process.arch}/${process.platform}_${process.arch}/koffi.node`,
} as const;
type AddonName = keyof typeof ADDON_SOURCES;

/**
 * A library's native part, to be loaded from there; undefined where the library finds it by itself. Throws
 * AppError `unavailable` when no directory will take it.
 */
export function nativeAddonPath(name: AddonName): string | undefined {
  return here.addonPath(name);
}

/** What differs between the places that davit runs from. In the executable `import.meta` has nothing to say. */
interface Place {
  assetText(name: AssetName): string;
  startThread(name: ThreadName, options: WorkerOptions): Worker;
  /** What stands for the program before its arguments. */
  main(): string[];
  addonPath(name: AddonName): string | undefined;
}

const SOURCE: Place = {
  assetText: (name) => readFileSync(join(import.meta.dirname, '..', ASSET_SOURCES[name]), 'utf8'),
  startThread: (name, options) => new Worker(join(import.meta.dirname, `${name}.ts`), options),
  main: () => [join(import.meta.dirname, 'main.ts')],
  addonPath: () => undefined,
};

const BUNDLE: Place = {
  assetText: (name) => readFileSync(join(import.meta.dirname, name), 'utf8'),
  startThread: (name, options) => new Worker(join(import.meta.dirname, `${basename(name)}.cjs`), options),
  main: () => [join(import.meta.dirname, 'main.cjs')],
  addonPath: (name) => join(import.meta.dirname, `${name}.node`),
};

const EXECUTABLE: Place = {
  assetText: (name) => getAsset(name, 'utf8'),
  startThread: (_name, options) => new Worker(getAsset('boot.cjs', 'utf8'), { ...options, eval: true }),
  main: () => [],
  addonPath: unpackedAddon,
};

const here = isSea() ? EXECUTABLE : import.meta.filename.endsWith('.ts') ? SOURCE : BUNDLE;

/**
 * The system loads a library from a file only, so the executable writes one: without a name, so that nobody
 * can put another in its place and nothing stays behind, however the process ends.
 *
 * All threads must load this one file. Two copies of SQLite in a process do not know of each other's locks,
 * and closing a file in one drops the locks of the other (sqlite.org/howtocorrupt.html, section 2.2.1). The
 * open descriptor is kept for the life of the process.
 */
function unpackedAddon(name: AddonName): string {
  const key = `davit:addon:${name}`;
  const known = getEnvironmentData(key);
  if (typeof known === 'string') return known;
  if (!isMainThread)
    throw new Error('the main thread unpacks the addon before it starts another: use startThread');
  // With Node's own 16 KiB it takes 5.5 ms in place of 3.6.
  const bytes = zstdDecompressSync(new Uint8Array(getRawAsset(`${name}.node`)), { chunkSize: 1024 * 1024 });
  const path = unpackAddon(name, bytes, libraryDirectories());
  setEnvironmentData(key, path);
  return path;
}

function libraryDirectories(): string[] {
  const userId = process.getuid?.() ?? 0;
  return [...new Set([tmpdir(), '/var/tmp', `/run/user/${userId}`, '/dev/shm'])];
}

/** As a file without a name can be found, proc_pid_fd(5). */
const OPEN_FILES = '/proc/self/fd';

/** The path of a nameless file with these bytes, in the first of `directories` from which code may be run. */
export function unpackAddon(name: AddonName, bytes: Uint8Array, directories: string[]): string {
  const refusals: string[] = [];
  for (const directory of directories) {
    try {
      return writeNameless(name, bytes, directory);
    } catch (error) {
      refusals.push(`${directory} ${codeOf(error)}`);
    }
  }
  if (!existsSync(OPEN_FILES)) {
    throw new AppError(
      'unavailable',
      `/proc does not show this process, and ${name} is loaded from there: mount it in the PID namespace of davit`,
    );
  }
  throw new AppError(
    'unavailable',
    `no directory to load ${name} from (${refusals.join(', ')}): set TMPDIR to one where this user may write and files may be executed`,
  );
}

function writeNameless(name: AddonName, bytes: Uint8Array, directory: string): string {
  const descriptor = openNameless(name, directory);
  try {
    writeFileSync(descriptor, bytes);
    const path = `${OPEN_FILES}/${descriptor}`;
    // access(2) refuses a file system that is mounted noexec, where loading would fail.
    accessSync(path, constants.X_OK);
    return path;
  } catch (error) {
    closeSync(descriptor);
    throw error;
  }
}

/** In a directory that is this user's alone, as the file has a name for a moment. */
function openNameless(name: AddonName, directory: string): number {
  const folder = mkdtempSync(join(directory, 'davit-'));
  const path = join(folder, `${name}.node`);
  try {
    return openSync(path, 'wx+', 0o700);
  } finally {
    rmSync(folder, { recursive: true });
  }
}
