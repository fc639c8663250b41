import { spawnSync } from 'node:child_process';
import { statSync } from 'node:fs';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import type { Key } from '../../src/domain.ts';
import { place } from '../helpers/cli.ts';
import { makeLarge } from '../helpers/large.ts';
import { ifHas } from '../helpers/programs.ts';
import { serve } from '../helpers/served.ts';

t.test('a file that cannot grow leaves all in the WAL, and ends nothing', ifHas('prlimit'), async (t) => {
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

  t.ok(statSync(`${dbPath}-wal`).size > 4 * 1024 * 1024, 'it was to be copied');
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

/** Writes beyond so many bytes of any file fail; `unlimited` where they did before. */
function limitFileSize(processId: number, limit: number | 'unlimited'): void {
  const { status, stderr } = spawnSync('prlimit', ['--pid', String(processId), `--fsize=${limit}:`]);
  if (status !== 0) throw new Error(String(stderr));
}
