import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  existsSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { listeningUrl } from '../listening-url.ts';
import { CA_FILE } from './receivers.ts';

/** The library that is preloaded into davit: none, libfaketime or libfiu. */
export type Preload = 'nothing' | 'faketime' | 'fiu';

/** One life of the service, from its start to its end. */
export interface Incarnation {
  process: ChildProcess;
  processId: number;
  url: string;
  /** From the start of the process to its first line of output. */
  readyMs: number;
  /** Its memory and descriptors, every half second. */
  samples: Sample[];
  /** Whether its end is intended: to be set before it is ended. */
  endExpected: boolean;
  ended: Promise<End>;
}

export interface Sample {
  residentBytes: number;
  /** Descriptors of established TCP connections, to clients and receivers, which decide how many there are. */
  connections: number;
  /** All others. */
  descriptors: number;
}

export interface End {
  exitCode: number | null;
  signal: string | null;
}

export interface Service {
  /** Where it listens; null while it does not. */
  url(): string | null;
  current(): Incarnation | null;
  incarnations: readonly Incarnation[];
  /** Starts it; resolves when it listens. Throws if it ends before. */
  start(preload?: Preload): Promise<Incarnation>;
  /** The same without waiting, to kill it while it starts. */
  launch(preload?: Preload): ChildProcess;
  /** Sends a signal and waits for the end; undefined: it had ended before. */
  end(signal: 'SIGKILL' | 'SIGTERM'): Promise<End | undefined>;
  /** Sets the clock of one that was started with faketime. */
  setClock(offsetMs: number): void;
  /** Makes this share of all fsyncs fail, in one that was started with fiu; 0: none. */
  failFsync(share: number): void;
  sample(): void;
  /** Sends SIGKILL to all its processes, without waiting for their ends. */
  killAll(): void;
}

interface ServiceOptions {
  executable: string;
  /** The run's directory, for logs, clock and control files. Not on davit's disk. */
  directory: string;
  databasePath: string;
  /** Called when the service has ended unintended. */
  onUnexpectedEnd(detail: string): void;
}

const FAKETIME_LIBRARY = findLibrary('faketime/libfaketimeMT.so.1');
const FIU_LIBRARIES = ['/usr/lib/fiu/fiu_run_preload.so', '/usr/lib/fiu/fiu_posix_preload.so'];

/** Short times, so that minutes show what takes days, and a rate limit that is never reached. */
const OPTIONS = [
  ...['--listen', '127.0.0.1:0', '--log-level', 'warn', '--rate-limit', '100000/1m'],
  ...['--max-concurrent', '8', '--max-queued', '40'],
  ...['--webhook-allow-http', '--webhook-allow-cidr', '127.0.0.0/8', '--webhook-ca-file', CA_FILE],
  ...['--webhook-timeout', '4s', '--webhook-retry-window', '40s'],
  ...['--webhook-retry-delays', '1s,1s,2s,4s,8s'],
];

/** Why fsync cannot be made to fail here; undefined: it can. */
export function whyNoFiu(): string | undefined {
  if (!FIU_LIBRARIES.every((path) => existsSync(path)) || !existsSync('/usr/bin/fiu-ctrl')) {
    return 'fiu-utils is not installed';
  }
  return undefined;
}

/** Why the clock cannot be moved here; undefined: it can. */
export function whyNoFaketime(): string | undefined {
  return FAKETIME_LIBRARY === undefined ? 'faketime is not installed' : undefined;
}

/** Runs `davit serve` on one file, again and again. */
export function createService(options: ServiceOptions): Service {
  const { executable, directory, databasePath, onUnexpectedEnd } = options;
  const clockFile = join(directory, 'clock');
  const fiuDirectory = join(directory, 'fiu');
  const temporaryDirectory = join(directory, 'tmp');
  const log = openSync(join(directory, 'davit.log'), 'a');
  const incarnations: Incarnation[] = [];
  const children = new Set<ChildProcess>();
  let current: Incarnation | null = null;
  mkdirSync(fiuDirectory, { recursive: true });
  mkdirSync(temporaryDirectory, { recursive: true });

  return {
    url: () => current?.url ?? null,
    current: () => current,
    incarnations,
    start,
    launch,
    async end(signal) {
      const incarnation = current;
      if (incarnation === null) return undefined;
      incarnation.endExpected = true;
      incarnation.process.kill(signal);
      return await incarnation.ended;
    },
    setClock(offsetMs) {
      writeFileSync(clockFile, `${offsetMs < 0 ? '-' : '+'}${Math.abs(offsetMs / 1000)}\n`);
    },
    failFsync(share) {
      const points = ['posix/io/sync/fsync', 'posix/io/sync/fdatasync'];
      const commands = points.map((name) =>
        share === 0 ? `disable name=${name}` : `enable_random name=${name},probability=${share}`,
      );
      const words = commands.flatMap((command) => ['-c', command]);
      execFileSync('fiu-ctrl', ['-f', join(fiuDirectory, 'control'), ...words, String(must().processId)], {
        timeout: 5_000,
      });
    },
    sample() {
      if (current === null) return;
      const sample = sampleOf(current.processId);
      if (sample !== undefined) current.samples.push(sample);
    },
    killAll() {
      for (const child of children) child.kill('SIGKILL');
    },
  };

  function must(): Incarnation {
    if (current === null) throw new Error('davit does not run');
    return current;
  }

  function launch(preload: Preload = 'nothing'): ChildProcess {
    if (preload === 'faketime') writeFileSync(clockFile, '+0\n');
    const child = spawn(executable, ['serve', '--db', databasePath, ...OPTIONS], {
      cwd: directory,
      env: { PATH: '/usr/bin:/bin', TMPDIR: temporaryDirectory, ...environmentOf(preload) },
      stdio: ['ignore', 'pipe', log],
    });
    children.add(child);
    child.once('exit', () => children.delete(child));
    return child;
  }

  function environmentOf(preload: Preload): Record<string, string> {
    switch (preload) {
      case 'nothing':
        return {};
      case 'faketime':
        return {
          LD_PRELOAD: FAKETIME_LIBRARY ?? '',
          FAKETIME_TIMESTAMP_FILE: clockFile,
          FAKETIME_NO_CACHE: '1',
          FAKETIME_DONT_FAKE_MONOTONIC: '1',
          DONT_FAKE_MONOTONIC: '1',
        };
      case 'fiu':
        return { LD_PRELOAD: FIU_LIBRARIES.join(' '), FIU_CTRL_FIFO: join(fiuDirectory, 'control') };
      default:
        return preload satisfies never;
    }
  }

  async function start(preload: Preload = 'nothing'): Promise<Incarnation> {
    const startedAtMs = performance.now();
    const child = launch(preload);
    const ended = once(child, 'exit').then(([exitCode, signal]) => ({ exitCode, signal }));
    const url = await listeningUrl(child);
    if (url === undefined) {
      const { exitCode, signal } = await ended;
      throw new Error(`davit did not start: it ended with ${signal ?? exitCode}\n${lastLines()}`);
    }
    const incarnation: Incarnation = {
      process: child,
      processId: child.pid ?? 0,
      url,
      readyMs: performance.now() - startedAtMs,
      samples: [],
      endExpected: false,
      ended,
    };
    incarnations.push(incarnation);
    current = incarnation;
    void ended.then(({ exitCode, signal }) => {
      if (current === incarnation) current = null;
      if (!incarnation.endExpected) onUnexpectedEnd(`it ended with ${signal ?? exitCode}: ${lastLines()}`);
    });
    return incarnation;
  }

  function lastLines(): string {
    return readFileSync(join(directory, 'davit.log'), 'utf8').split('\n').slice(-4).join('\n');
  }
}

function sampleOf(processId: number): Sample | undefined {
  const directory = `/proc/${processId}`;
  try {
    const status = readFileSync(`${directory}/status`, 'latin1');
    const residentBytes = Number(/^VmRSS:\s+(\d+) kB$/m.exec(status)?.[1] ?? 0) * 1024;
    const descriptors = readdirSync(`${directory}/fd`);
    const established = establishedConnections(directory);
    const connections = descriptors.filter((name) => established.has(targetOf(`${directory}/fd/${name}`)));
    return {
      residentBytes,
      connections: connections.length,
      descriptors: descriptors.length - connections.length,
    };
  } catch {
    return undefined; // it is gone
  }
}

/**
 * Established connections, named as links in /proc/<id>/fd name them. proc_pid_net(5): field 4 is the state, 10 the
 * inode.
 */
function establishedConnections(directory: string): Set<string> {
  const lines = ['tcp', 'tcp6'].flatMap((name) =>
    readFileSync(`${directory}/net/${name}`, 'latin1').trim().split('\n').slice(1),
  );
  const established = lines.map((line) => line.trim().split(/\s+/)).filter((fields) => fields[3] === '01');
  return new Set(established.map((fields) => `socket:[${fields[9]}]`));
}

function targetOf(link: string): string {
  try {
    return readlinkSync(link);
  } catch {
    return ''; // closed meanwhile
  }
}

/** A process with the marker of a deployment of this run. */
interface MarkedProcess {
  processId: number;
  deploymentId: string;
}

/** All processes whose environment says that they belong to a deployment of the run with this name. */
export function markedProcesses(runName: string): MarkedProcess[] {
  return readdirSync('/proc')
    .map(Number)
    .filter(Number.isInteger)
    .flatMap((processId) => {
      try {
        const environment = readFileSync(`/proc/${processId}/environ`, 'latin1').split('\0');
        if (!environment.includes(`CHAOS_RUN=${runName}`)) return [];
        const deploymentId = environment.find((entry) => entry.startsWith('DEPLOY_ID='))?.slice(10);
        return deploymentId === undefined ? [] : [{ processId, deploymentId }];
      } catch {
        return []; // it is gone
      }
    });
}

function findLibrary(name: string): string | undefined {
  const architectures = ['x86_64-linux-gnu', 'aarch64-linux-gnu'];
  return architectures.map((one) => `/usr/lib/${one}/${name}`).find((path) => existsSync(path));
}
