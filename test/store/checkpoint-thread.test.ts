import { spawnSync } from 'node:child_process';
import { copyFileSync, existsSync, readFileSync, renameSync, statSync } from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { startThread } from '../../src/assets.ts';
import type { Key } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { openFilesOf } from '../../src/proc.ts';
import type { CheckpointThreadData } from '../../src/store/checkpoint-thread.ts';
import { openForReading, openForWriting } from '../../src/store/database.ts';
import { identifyFiles, MOVED } from '../../src/store/place.ts';
import { place } from '../helpers/cli.ts';
import { until } from '../helpers/commands.ts';
import { makeLarge } from '../helpers/large.ts';
import { ifHas } from '../helpers/programs.ts';
import { serve } from '../helpers/served.ts';
import { openWithThread, PROJECT, temporaryDirectory } from '../helpers/store.ts';

t.test('while the file cannot grow, writes stay in the WAL and none is lost', ifHas('prlimit'), async (t) => {
  const { directory, dbPath, json } = place(t);
  makeLarge(dbPath, 8);
  const { secret } = await json<Key & { secret: string }>(
    'admin key create --name ci --all-scopes --all-projects'.split(' '),
  );
  const service = await serve(t, directory, '--rate-limit', 'off');
  const deploy = async () => {
    const response = await fetch(`${service.url}/v2/projects/prj_1/deployments`, {
      method: 'POST',
      headers: { authorization: `Bearer ${secret}`, 'content-type': 'application/json' },
      body: JSON.stringify({ ref: 'main' }),
    });
    await response.body?.cancel();
    return response.status;
  };
  // Enough for a WAL that asks to be copied, and less than the file has already.
  const limitBytes = 6_000_000;
  t.ok(statSync(dbPath).size > limitBytes);
  limitFileSize(service.processId, limitBytes);
  let acknowledged = 0;
  while ((await deploy()) === 201) acknowledged += 1;

  t.ok(statSync(`${dbPath}-wal`).size > 4 * 1024 * 1024, 'it is long enough to be copied');
  t.equal(await deploy(), 503);
  t.equal((await fetch(`${service.url}/healthz`)).status, 200);

  limitFileSize(service.processId, 'unlimited');
  t.equal(await deploy(), 201);
  t.equal(await service.stop(), 0);
  const file = new Sqlite(dbPath, { readonly: true });
  t.teardown(() => file.close());
  const count = file.prepare("SELECT count(*) FROM deployments WHERE ref = 'main' AND id <> 'dpl_1'").pluck();
  t.equal(count.get(), acknowledged + 1);
  t.equal(file.pragma('integrity_check', { simple: true }), 'ok');
});

t.test('the WAL of a moved file is copied into the moved file, and no new one is made', async (t) => {
  const { path, moved, store } = await withLargeWal(t);
  renameSync(path, moved);
  await until(() => statSync(moved).size > LARGE_BYTES);
  t.notOk(existsSync(path));

  renameSync(moved, path);
  await store.close();
  t.equal(countProjects(path), PROJECTS, 'nothing that was acknowledged is lost');
});

t.test('the WAL of a moved file is not copied into the file that took its place', async (t) => {
  const { path, moved, store } = await withLargeWal(t);
  const other = join(temporaryDirectory(t), 'other.db');
  openForWriting(other, realEffects).close();
  const before = readFileSync(other);
  renameSync(path, moved);
  renameSync(other, path);
  await until(() => statSync(moved).size > LARGE_BYTES);
  t.ok(readFileSync(path).equals(before));

  renameSync(path, other);
  renameSync(moved, path);
  await store.close();
  t.equal(countProjects(path), PROJECTS);
});

t.test('a file that took the place of the one that is served is not opened by the thread', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  openForWriting(path, realEffects).close();
  const files = identifyFiles(path);
  renameSync(path, `${path}.moved`);
  copyFileSync(`${path}.moved`, path);
  const workerData: CheckpointThreadData = { path, files };
  const thread = startThread('store/checkpoint-thread', { workerData });
  let error: Error | undefined;
  thread.once('error', (thrown: Error) => {
    error = thrown;
  });
  let wasOpened = false;
  await until(() => {
    wasOpened ||= openFilesOf(process.pid).includes(path);
    return error !== undefined;
  });
  t.notOk(wasOpened);
  t.match(error, { message: MOVED });
});

const PROJECTS = 60;
const LARGE_BYTES = 4 * 1024 * 1024;

/** A writer in its thread, with a WAL that is long enough to be copied. */
async function withLargeWal(t: Test) {
  const path = join(temporaryDirectory(t), 'davit.db');
  const store = await openWithThread(t, path);
  const project = { ...PROJECT, variables: { FILLER: 'x'.repeat(100_000) } };
  await Promise.all(Array.from({ length: PROJECTS }, () => store.writer.write('projects.create', project)));
  return { path, moved: `${path}.moved`, store };
}

function countProjects(path: string): unknown {
  const file = openForReading(path);
  try {
    return file.prepare('SELECT count(*) FROM projects').pluck().get();
  } finally {
    file.close();
  }
}

/** Lets writes beyond so many bytes of a file fail; `unlimited` ends that. */
function limitFileSize(processId: number, limit: number | 'unlimited'): void {
  const { status, stderr } = spawnSync('prlimit', ['--pid', String(processId), `--fsize=${limit}:`]);
  if (status !== 0) throw new Error(String(stderr));
}
