import { execFileSync } from 'node:child_process';
import { chownSync, mkdirSync, readdirSync } from 'node:fs';
import { userInfo } from 'node:os';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import type { Bench } from '../measure.ts';
import { findProgram, outputOf, packagesMissing, socketDirectory, start } from '../processes.ts';
import { connectToPostgres, type PostgresPlace } from './postgres-accept.ts';

type Postgres = { place: PostgresPlace } | { missing: string };

/**
 * A PostgreSQL of the measure's own, on a Unix socket, as durable as by default (`fsync`, `synchronous_commit`); or why
 * it cannot take part. Started by root, it runs as the user postgres.
 */
export async function startPostgres(bench: Bench, ...packages: string[]): Promise<Postgres> {
  const found = binaries();
  if (found === undefined) return { missing: 'PostgreSQL is not installed: apt-get install postgresql' };
  const missing = packagesMissing(packages);
  if (missing !== undefined) return { missing };
  bench.progress('starting PostgreSQL');
  try {
    return { place: await startCluster(bench, found) };
  } catch (error) {
    const reason = error instanceof Error ? error.message : String(error);
    return { missing: `PostgreSQL cannot be started (${reason.trim()}): try another --data-dir` };
  }
}

/** Debian has these programs outside PATH; the newest version is taken. */
function binaries(): { initdb: string; postgres: string } | undefined {
  const versions = readdirIfThere('/usr/lib/postgresql').sort((a, b) => Number(b) - Number(a));
  const directories = versions.map((version) => `/usr/lib/postgresql/${version}/bin`);
  const initdb = findProgram('initdb', directories);
  const postgres = findProgram('postgres', directories);
  return initdb === undefined || postgres === undefined ? undefined : { initdb, postgres };
}

function readdirIfThere(path: string): string[] {
  try {
    return readdirSync(path);
  } catch {
    return [];
  }
}

async function startCluster(
  { directory, defer }: Bench,
  { initdb, postgres }: { initdb: string; postgres: string },
): Promise<PostgresPlace> {
  const data = join(directory, 'postgres');
  const host = socketDirectory();
  mkdirSync(data, { mode: 0o700 });
  const owner = userInfo().uid === 0 ? postgresUser() : undefined;
  if (owner !== undefined) {
    for (const path of [data, host]) chownSync(path, owner.uid, owner.gid);
  }
  const options = { cwd: host, env: { PATH: '/usr/bin:/bin', LC_ALL: 'C.UTF-8' }, ...owner };
  await outputOf(initdb, ['--pgdata', data, '--auth', 'trust', '--username', 'bench'], options);
  const settings = [
    `unix_socket_directories=${host}`,
    'listen_addresses=',
    'max_connections=100',
    'shared_buffers=512MB',
    'max_wal_size=4GB',
    'fsync=on',
    'synchronous_commit=on',
  ];
  const words = ['-D', data, ...settings.flatMap((setting) => ['-c', setting])];
  // The guard asks for an immediate shutdown, as the children of PostgreSQL would outlive a SIGKILL for a moment.
  const running = start(postgres, words, { ...options, stdio: 'ignore', lastResort: 'SIGQUIT' });
  defer(() => running.stop('SIGINT'));
  const place = { host, user: 'bench', database: 'postgres' };
  await untilItAnswers(place);
  return place;
}

function postgresUser(): { uid: number; gid: number } {
  const idOf = (option: string) => Number(execFileSync('id', [option, 'postgres'], { encoding: 'utf8' }));
  return { uid: idOf('-u'), gid: idOf('-g') };
}

async function untilItAnswers(place: PostgresPlace): Promise<void> {
  for (let attempt = 1; ; attempt += 1) {
    try {
      const pool = await connectToPostgres(place, 1);
      await pool.query('SELECT 1');
      await pool.end();
      return;
    } catch (error) {
      if (attempt === 100) throw error;
      await delay(100);
    }
  }
}
