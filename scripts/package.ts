import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  copyFileSync,
  existsSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { constants, zstdCompressSync } from 'node:zlib';
import { log } from '@yao-pkg/pkg/lib-es5/log.js';
import pkg from '@yao-pkg/pkg/lib-es5/sea.js';
import packageJson from '../package.json' with { type: 'json' };
import { BUNDLE, buildBundles } from './build.ts';
import { codeName, RECORDER, recordCode } from './record-code.ts';

/*
 * Makes build/davit out of build/bundle/ and the Node that runs this script.
 *
 * Node's own form of a single executable ("SEA") by pkg's plain mode. Its other mode, which puts a file system
 * into the executable, also patches the running program: a deployment's `sh -c 'node …'` would start davit
 * instead of node, and native addons go to ~/.cache. `pkg --sea` on the command line takes no assets in the
 * plain mode, so its function is called.
 */

const ROOT = join(import.meta.dirname, '..');
const EXECUTABLE = join(ROOT, 'build/davit');
const NODE = join(ROOT, 'build/node-stripped');
/** What EXECUTABLE was made of, so that making it again can be skipped. */
const MADE_OF = join(ROOT, 'build/davit.made-of');

/** Node's command line options in the executable. */
const NODE_ARGUMENTS = [
  // The young generation of the main thread; src/memory.ts bounds that of the other threads. Without a bound V8 let it
  // grow to 134 MB in one thread, and the service to 430 MB within two minutes of light load; with 8 or 16 it was 290
  // MB. With 8 twice as much was promoted, and major collections paused it twice as often.
  '--max-semi-space-size=16',
  // Nearly all objects of the start survive. With V8's initial 1 MiB they were copied again and again, for 10 ms.
  '--min-semi-space-size=8',
  // One thread collects the young generation, as helper threads take the processor from the writer: on two cores 8,550
  // deployments were created a second in place of 7,900.
  '--no-parallel-scavenge',
  // SIGUSR1 would open a debugger, which every user of the machine could connect to.
  '--disable-sigusr1',
  // src/memory.ts collects what a load has left, and says why V8 should not.
  '--no-memory-reducer',
  // V8's compilers and collectors take turns in one thread. In four, on two cores, they held up all requests as soon as
  // what each request calls was to be compiled: of the first 10 s under load, 1 % took 20 to 25 ms, and now take 16.
  '--v8-pool-size=1',
];

/** What the executable's main script is. */
const BOOT = 'boot.cjs';
/** Starts after src/memory.ts has changed V8's flags, so V8 would refuse the code recorded in this thread. */
const NOT_RECORDED = 'checkpoint-thread.cjs';

// pkg's steps are no news: they are the same each time.
log.info = () => undefined;

const nodeVersion = packageJson.optionalDependencies[`node-linux-${process.arch as 'arm64' | 'x64'}`];
if (process.versions.node !== nodeVersion) {
  throw new Error(`davit ships Node ${nodeVersion}, but this is ${process.version}: use npm run package`);
}
await buildBundles();
const files = readdirSync(BUNDLE);
/** The main scripts of the threads, which src/boot.ts runs. */
const bundles = files.filter((name) => name.endsWith('.cjs') && name !== BOOT);
const assets = Object.fromEntries(
  files.map((name) => [name, name.endsWith('.node') ? compressed(name) : join(BUNDLE, name)]),
);
const madeOf = fingerprint();
if (existsSync(EXECUTABLE) && existsSync(MADE_OF) && readFileSync(MADE_OF, 'utf8') === madeOf) {
  say(`build/davit is up to date (${megabytes(EXECUTABLE)})`);
} else {
  await makeExecutable();
  writeFileSync(MADE_OF, madeOf);
  say(`build/davit made (${megabytes(EXECUTABLE)})`);
}

/** Compressed, native addons have a third of their size, and are loaded 5 ms later. */
function compressed(name: string): string {
  const path = join(ROOT, 'build', `${name}.zst`);
  const bytes = zstdCompressSync(readFileSync(join(BUNDLE, name)), {
    params: { [constants.ZSTD_c_compressionLevel]: 19 },
  });
  writeFileSync(path, bytes);
  return path;
}

function fingerprint(): string {
  const hash = createHash('sha256');
  for (const path of [...Object.values(assets), import.meta.filename, ...RECORDER, process.execPath]) {
    hash.update(path).update('\0').update(readFileSync(path)).update('\0');
  }
  return hash.digest('hex');
}

/**
 * Makes it twice: V8's code cache is best taken from a davit that has been used, so the second executable contains the
 * code that was recorded from the first.
 */
async function makeExecutable(): Promise<void> {
  rmSync(MADE_OF, { force: true });
  prepareNode();
  const made = `${EXECUTABLE}.made`;
  const copy = `${EXECUTABLE}.new`;
  const directory = mkdtempSync(join(ROOT, 'build/code-'));
  for (const name of bundles) writeFileSync(join(directory, codeName(name)), '');
  try {
    await makeFrom(directory, made, 'env');
    await recordCode(
      made,
      directory,
      bundles.filter((name) => name !== NOT_RECORDED),
    );
    rmSync(made);
    await makeFrom(directory, made, 'none');
  } finally {
    rmSync(directory, { recursive: true });
  }
  // cp writes it in small pieces, as on a machine that it is copied to. Of a file that is written in one piece, as pkg
  // does, Linux 6.18 maps larger parts at once: under load davit would have 58 MB of its own file in memory, not 42.
  execFileSync('cp', [made, copy]);
  rmSync(made);
  // A davit that is running keeps the old file.
  renameSync(copy, EXECUTABLE);
}

/**
 * Makes the executable `output` with the recorded code in `directory`. With `env` it heeds NODE_OPTIONS, with which
 * another program's environment would load foreign code into davit, open a debugger, or keep it from starting.
 */
async function makeFrom(directory: string, output: string, execArgvExtension: 'env' | 'none'): Promise<void> {
  const code = bundles.map((name) => [codeName(name), join(directory, codeName(name))]);
  // pkg's types lack two of these, but pkg passes all of this on to Node.
  const seaConfig = {
    disableExperimentalSEAWarning: true,
    useSnapshot: false,
    useCodeCache: false,
    execArgv: NODE_ARGUMENTS,
    execArgvExtension,
    assets: { ...assets, ...Object.fromEntries(code) },
  };
  await pkg.default(join(BUNDLE, BOOT), {
    nodePath: NODE,
    targets: [{ nodeRange: `node${process.versions.node}`, platform: 'linux', arch: process.arch, output }],
    seaConfig,
  });
}

/** Without its symbol tables Node is 18 MB smaller. */
function prepareNode(): void {
  copyFileSync(process.execPath, NODE);
  try {
    execFileSync('strip', [NODE], { stdio: 'pipe' });
  } catch (error) {
    copyFileSync(process.execPath, NODE);
    const reason = error instanceof Error ? error.message : String(error);
    say(`build/davit will be 18 MB larger than necessary, as strip (Debian: binutils) failed: ${reason}`);
  }
}

function megabytes(path: string): string {
  return `${(statSync(path).size / 1e6).toFixed(1)} MB`;
}

function say(line: string): void {
  process.stdout.write(`${line}\n`);
}
