import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import type { Key } from '../../src/domain.ts';
import type { ProjectDetails } from '../../src/store/projects.ts';
import { COMPILE_CACHE, place } from '../helpers/cli.ts';

t.test(
  'commands go on working while another process writes all the time, and neither loses anything',
  async (t) => {
    const { davit, json, dump, dbPath } = place(t);
    const busy = await busyWriter(t, dbPath);
    const names = ['one', 'two', 'three', 'four'];
    const made = await Promise.all(
      names.map((name) => davit(['admin', 'project', 'create', '--name', name, '--env', `NAME=${name}`])),
    );
    t.strictSame(
      made.map(({ exitCode }) => exitCode),
      [0, 0, 0, 0],
    );
    const [key, paused] = await Promise.all([
      json<Key>(['admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--project', ...names]),
      json<ProjectDetails>(['admin', 'project', 'pause', 'one']),
    ]);
    t.equal(key.project_ids.length, names.length);
    t.equal(paused.status, 'paused');
    const listed = await json<ProjectDetails[]>(['admin', 'project', 'list']);
    t.ok(listed.length > names.length, 'what the other process wrote is seen');

    const count = await busy.stop();
    t.ok(count > 0);
    t.equal(dump()['projects']?.length, count + names.length);
    t.match(await json<ProjectDetails>(['admin', 'project', 'show', 'one']), {
      status: 'paused',
      variable_names: ['NAME'],
    });
  },
);

async function busyWriter(t: Test, dbPath: string): Promise<{ stop(): Promise<number> }> {
  const child = spawn(process.execPath, [join(import.meta.dirname, 'busy-writer.ts'), dbPath], {
    env: COMPILE_CACHE,
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  t.teardown(() => child.kill());
  let stdout = '';
  child.stdout.setEncoding('utf8').on('data', (text: string) => {
    stdout += text;
  });
  await Promise.race([once(child.stdout, 'data'), once(child, 'exit')]);
  return {
    async stop() {
      child.stdin.end();
      await once(child, 'close');
      return Number(stdout.replace('begun', ''));
    },
  };
}
