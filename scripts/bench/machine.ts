import { statfsSync } from 'node:fs';
import { availableParallelism, cpus, loadavg, release, totalmem } from 'node:os';
import Sqlite from 'better-sqlite3';

/** The machine, without which figures mean nothing. */
interface Machine {
  cores: number;
  processor: string;
  memoryGb: number;
  kernel: string;
  node: string;
  sqlite: string;
  /** That of the data directory. */
  fileSystem: string;
  /** The load average of the minute before. */
  loadBefore: number;
}

/** To be called before anything is started. */
export function describeMachine(directory: string): Machine {
  const memory = new Sqlite(':memory:');
  const sqlite = memory.prepare('SELECT sqlite_version()').pluck().get() as string;
  memory.close();
  return {
    cores: availableParallelism(),
    processor: cpus()[0]?.model.trim() ?? 'unknown',
    memoryGb: Math.round(totalmem() / 1e9),
    kernel: release(),
    node: process.version,
    sqlite,
    fileSystem: fileSystemOf(directory),
    loadBefore: Math.round((loadavg()[0] ?? 0) * 10) / 10,
  };
}

/** The machine in words, with a warning if other programs keep it busy. */
export function machineText({ loadBefore, ...machine }: Machine): string {
  const { cores, processor, memoryGb, kernel, node, sqlite, fileSystem } = machine;
  const facts = `${cores} cores of ${processor}, ${memoryGb} GB, Linux ${kernel}, Node ${node}, SQLite ${sqlite}, data on ${fileSystem}`;
  return loadBefore < BUSY_FROM * cores
    ? facts
    : `${facts}\nTHE MACHINE IS BUSY with other programs (load ${loadBefore}): these figures mean little, their ratios somewhat more`;
}

/** Running programs for each core. */
const BUSY_FROM = 0.3;

/** The name of f_type, statfs(2). Throws for a file system in memory, where fsync costs nothing. */
function fileSystemOf(directory: string): string {
  const { type } = statfsSync(directory);
  const name = FILE_SYSTEMS.get(type) ?? `file system 0x${type.toString(16)}`;
  if (IN_MEMORY.has(name)) {
    throw new Error(`${directory} is on ${name}, in memory: give --data-dir a directory on a real disk`);
  }
  return name;
}

const FILE_SYSTEMS = new Map([
  [0xef53, 'ext4'],
  [0x58465342, 'xfs'],
  [0x9123683e, 'btrfs'],
  [0x2fc12fc1, 'zfs'],
  [0xf2f52010, 'f2fs'],
  [0x794c7630, 'overlayfs'],
  [0x6969, 'nfs'],
  [0x01021994, 'tmpfs'],
  [0x858458f6, 'ramfs'],
]);
const IN_MEMORY = new Set(['tmpfs', 'ramfs']);
