import { mkdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { openFile, serve } from '../davit.ts';
import { alternate, figureRow, type Measure, rowBelow, samplesOf } from '../measure.ts';
import { monotonicMs, outputOf } from '../processes.ts';

const NEW_FILE = 'davit, no file yet';
const EMPTY = 'davit, an empty file';
const LARGE = 'davit, a file of 1 GB';
const NODE = 'Node and an empty script';

const LARGE_BYTES = 1e9;
/** A start takes a fraction of a second, so more rounds are cheap. */
const ROUNDS_FACTOR = 4;

export const start: Measure = {
  name: 'start',
  title: 'start to ready: from the start of the process to its first line',
  async run(bench) {
    const fresh = join(bench.directory, 'new');
    const empty = join(bench.directory, 'empty');
    const large = join(bench.directory, 'large');
    await openFile(empty).close();
    bench.progress('making a file of 1 GB');
    await makeLarge(large);

    const results = await alternate({ ...bench, rounds: bench.rounds * ROUNDS_FACTOR }, [
      {
        name: NEW_FILE,
        run: async () => {
          rmSync(fresh, { recursive: true, force: true });
          mkdirSync(fresh);
          return await startOnce(fresh);
        },
      },
      { name: EMPTY, run: () => startOnce(empty) },
      { name: LARGE, run: () => startOnce(large) },
      { name: NODE, run: startNode },
    ]);
    const ms = (name: string) => samplesOf(results, name, 'ms');
    return [
      rowBelow(NEW_FILE, 'ms', ms(NEW_FILE), 200),
      rowBelow(EMPTY, 'ms', ms(EMPTY), 200),
      rowBelow(LARGE, 'ms', ms(LARGE), 300),
      figureRow(NODE, 'ms', ms(NODE)),
    ];
  },
};

async function startOnce(directory: string): Promise<{ ms: number }> {
  const davit = await serve(directory);
  await davit.stop();
  return { ms: davit.readyMs };
}

async function startNode(): Promise<{ ms: number }> {
  const fromMs = monotonicMs();
  await outputOf(process.execPath, ['-e', '']);
  return { ms: monotonicMs() - fromMs };
}

/** A hundred thousand deployments with their events and logs. */
async function makeLarge(directory: string): Promise<void> {
  const file = openFile(directory);
  await file.key();
  file.database.pragma('synchronous = OFF');
  file.database.exec(`
    BEGIN;
    INSERT INTO projects (id, name, status, created_at, policy) VALUES ('prj_1', 'website', 'active', 1, 'queue');
    WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 100000)
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at, finished_at, exit_code)
    SELECT 'dpl_' || n, 'prj_1', 'v1.0.' || n, 'succeeded', 0, 'api', n, n, n, 0 FROM number;
    INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
    SELECT 'evt_' || seq, 'deployment.succeeded', id, project_id, seq, '{}' FROM deployments;
    INSERT INTO log_chunks (deployment_id, start, bytes)
    SELECT id, 0, randomblob(${LARGE_BYTES / 100_000}) FROM deployments;
    COMMIT`);
  await file.close();
}
