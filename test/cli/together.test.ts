import t from 'tap';
import type { Key } from '../../src/domain.ts';
import type { ProjectDetails } from '../../src/store/projects.ts';
import { busyWriter } from '../helpers/busy.ts';
import { place } from '../helpers/cli.ts';

t.test('commands work while another process keeps writing, and no write is lost', async (t) => {
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

  await busy.stop();
  const count = busy.acknowledged().length;
  t.ok(count > 0);
  t.equal(dump()['projects']?.length, count + names.length);
  t.match(await json<ProjectDetails>(['admin', 'project', 'show', 'one']), {
    status: 'paused',
    variable_names: ['NAME'],
  });
});
