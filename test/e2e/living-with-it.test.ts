import { execFile } from 'node:child_process';
import { mkdirSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import t from 'tap';
import { executablePath } from '../helpers/executable.ts';
import { place } from '../helpers/service.ts';

/* What a person does with the executable besides serving: copies and restores, and deploys from a CI job. */

const execute = promisify(execFile);

t.test('a service can be deployed to, backed up, examined and restored elsewhere', async (t) => {
  const { davit, directory, serve } = place(t);
  const command = ['sh', '-c', 'echo "deploying $DEPLOY_REF"; test "$DEPLOY_REF" != bad'];
  const project = await davit('admin', 'project', 'create', '--name', 'site', '--', ...command);
  const key = await davit('admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--all-projects');
  const service = await serve();
  const asCiJob = (ref: string) =>
    execute(executablePath(), ['deploy', String(project['id']), ref, '--wait'], {
      env: { DAVIT_URL: service.url, DAVIT_KEY: String(key['secret']) },
    });

  t.match(await asCiJob('v1'), { stdout: 'deploying v1\n', stderr: /of v1: succeeded in/ });
  await t.rejects(asCiJob('bad'), {
    code: 1,
    stdout: 'deploying bad\n',
    stderr: /of bad: failed: exit code 1/,
  });

  const copy = join(directory, 'copy.db');
  t.match(await davit('backup', copy), { projects: 1, keys: 1, deployments: 2 });
  t.match(await davit('doctor'), { ok: true, service: { process_id: service.processId } });
  await t.rejects(davit('restore', copy, '--yes'), { code: 1, stderr: /is served by process \d+ since/ });
  t.equal(await service.stop(), 0);

  t.match(await davit('restore', copy, '--yes'), { deployments: 2, kept_as: /davit\.db\.before-restore-/ });
  mkdirSync(join(directory, 'new'));
  const restored = ['restore', copy, '--db', join(directory, 'new/davit.db')];
  await execute(executablePath(), restored, { env: {} });
  t.strictSame(readdirSync(join(directory, 'new')).sort(), ['davit.db', 'davit.db-lock']);
  const again = await serve();
  const page = await again.request('GET', '/v2/deployments', { key: String(key['secret']) });
  t.match(page.json(), {
    data: [
      { ref: 'bad', status: 'failed' },
      { ref: 'v1', status: 'succeeded' },
    ],
  });
  t.equal(await again.stop(), 0);
});
