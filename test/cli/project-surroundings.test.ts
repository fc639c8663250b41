import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir, userInfo } from 'node:os';
import { join, resolve } from 'node:path';
import t, { type Test } from 'tap';
import { checkTemporaryDirectory } from '../../src/cli/project-files.ts';
import { findingsOf } from '../../src/cli/project-findings.ts';
import { pathsOf, surroundingsOf, viewOf } from '../../src/cli/project-surroundings.ts';
import type { ProjectDetails } from '../../src/store/projects.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { ifMayBeNobody, NOBODY } from '../helpers/nobody.ts';
import { ifMayMount } from '../helpers/small-disk.ts';
import { PROJECT, temporaryDirectory, testStore } from '../helpers/store.ts';

t.test('a path that does not answer is a problem and does not hold up the other checks', async (t) => {
  const effects = fakeEffects();
  const away = await project(t, '/net/away', ['./deploy.sh']);
  const here = await project(t, '/', ['/bin/true']);
  const looked: string[] = [];
  const found = surroundingsOf([away, here, here], { dbPath: 'davit.db', service: null }, effects, (path) => {
    looked.push(path);
    return path === '/net/away' ? new Promise(() => undefined) : Promise.reject(new Error('ENOENT'));
  });
  effects.advance(5_000);
  const surroundings = await found;
  t.strictSame(looked, ['/net/away', '/net/away/deploy.sh', '/', '/bin/true', resolve(tmpdir())]);
  t.strictSame([...surroundings.unanswered], ['/net/away']);
  t.match(
    findingsOf(away, {}, surroundings).filter(({ level }) => level === 'problem'),
    [{ check: 'directory', message: /^\/net\/away does not answer: / }],
  );
  t.strictSame(
    findingsOf(here, {}, surroundings).filter(({ level }) => level === 'problem'),
    [],
  );
});

t.test('a temporary directory that does not answer is a problem, and not tried', async (t) => {
  const effects = fakeEffects();
  const projects = [await project(t, null, ['/bin/true'])];
  const found = surroundingsOf(projects, { dbPath: 'davit.db', service: null }, effects, (path) =>
    path === resolve(tmpdir()) ? new Promise(() => undefined) : Promise.resolve(),
  );
  effects.advance(5_000);
  t.match(checkTemporaryDirectory(projects, await found), [
    { check: 'directory', level: 'problem', message: /does not answer: / },
  ]);
});

t.test('the paths checked are the directory and a command with a slash', async (t) => {
  t.strictSame(pathsOf(await project(t, null, ['tool'])), []);
  t.strictSame(pathsOf(await project(t, '/srv', ['tool'])), ['/srv']);
  t.strictSame(pathsOf(await project(t, '/srv', ['bin/tool'])), ['/srv', '/srv/bin/tool']);
  t.strictSame(pathsOf(await project(t, null, ['/opt/tool', '/x'])), ['/opt/tool']);
  t.strictSame(pathsOf({ ...(await project(t, null, ['tool'])), command: null }), []);
});

t.test('a path hidden from the service is a problem, a read-only one a note', ifMayMount, async (t) => {
  const directory = temporaryDirectory(t);
  for (const name of ['seen', 'hidden', 'read']) mkdirSync(join(directory, name));
  for (const name of ['seen', 'hidden'])
    writeFileSync(join(directory, name, 'tool'), '#!/bin/sh\n', { mode: 0o755 });
  symlinkSync(join(directory, 'hidden/tool'), join(directory, 'seen/link'));
  const service = await inMounts(t, directory, [
    'mount -t tmpfs none hidden',
    'mount --bind read read && mount -o remount,ro,bind read',
  ]);
  const view = (path: string) => viewOf(service.pid ?? 0, join(directory, path));
  t.equal(view('seen'), 'same');
  t.equal(view('hidden'), 'hidden');
  t.equal(view('hidden/tool'), 'hidden');
  t.equal(view('seen/link'), 'hidden', 'the target of a link counts');
  t.equal(view('read'), 'readOnly');
  t.equal(viewOf(2 ** 22 + 1, directory), 'same', 'an unknown process hides nothing');

  const atService = {
    serviceProcessId: service.pid ?? 0,
    temporaryDirectory: directory,
    unanswered: new Set<string>(),
  };
  const problems = async (folder: string, command: string) =>
    findingsOf(await project(t, join(directory, folder), [command]), {}, atService)
      .filter(({ level, message }) => level !== 'ok' && message.includes(directory))
      .map(({ check, level, message }) => [check, level, message.split(directory)[0]]);
  t.strictSame(await problems('seen', './tool'), []);
  t.strictSame(await problems('seen', './link'), [['command', 'problem', 'the service does not see ']]);
  t.strictSame(await problems('hidden', '/bin/true'), [
    ['directory', 'problem', 'the service does not see '],
  ]);
  t.strictSame(await problems('read', '/bin/true'), [['directory', 'note', 'the service may only read ']]);

  const withHome = async (folder: string) =>
    findingsOf(await project(t, null, ['/bin/true']), { HOME: join(directory, folder) }, atService).filter(
      ({ check }) => check === 'directory',
    );
  t.match(await withHome('seen'), [{ level: 'ok' }]);
  t.match(await withHome('read'), [
    { level: 'ok' },
    { level: 'note', message: "HOME is the project's own, where the service cannot work" },
  ]);

  const commands = [await project(t, null, ['/bin/true'])];
  const tried = (serviceProcessId: number | null) =>
    checkTemporaryDirectory(commands, {
      serviceProcessId,
      temporaryDirectory: join(directory, 'hidden/tool'),
      unanswered: new Set(),
    });
  t.match(tried(null), [{ level: 'problem', message: /ENOTDIR/ }]);
  t.strictSame(tried(service.pid ?? 0), [], 'the service has its own temporary directory there');
});

const ifMayMountAsNobody = { ...ifMayMount, ...ifMayBeNobody() };

t.test(
  'the home of who checks is asked of a service of the same user only',
  ifMayMountAsNobody,
  async (t) => {
    const directory = temporaryDirectory(t);
    const { homedir } = userInfo();
    const notes = async (uid: number) => {
      const { pid = 0 } = await inMounts(t, directory, [`mount -t tmpfs none ${homedir}`], uid);
      const surroundings = {
        serviceProcessId: pid,
        temporaryDirectory: directory,
        unanswered: new Set<string>(),
      };
      t.equal(viewOf(pid, homedir), 'hidden');
      return findingsOf(await project(t, null, ['/bin/true']), {}, surroundings).filter(
        ({ level }) => level === 'note',
      );
    };
    t.match(await notes(0), [{ message: `HOME is ${homedir}, where the service cannot work` }]);
    t.strictSame(await notes(NOBODY), []);
  },
);

async function project(
  t: Test,
  directory: string | null,
  command: [string, ...string[]],
): Promise<ProjectDetails> {
  const store = testStore(t);
  const { id } = await store.writer.write('projects.create', {
    ...PROJECT,
    name: 'site',
    directory,
    command,
  });
  return store.reads.projects.resolve(id);
}

/** A process in a mount namespace of its own in which these lines were run. */
async function inMounts(
  t: Test,
  directory: string,
  lines: string[],
  uid = process.getuid?.() ?? 0,
): Promise<ChildProcess> {
  const script = [...lines, 'echo ready', 'exec sleep 600'].join(' && ');
  const child = spawn('unshare', ['-rm', 'sh', '-c', script], {
    cwd: directory,
    uid,
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  t.teardown(() => child.kill('SIGKILL'));
  if (child.stdout === null) throw new Error('its stdout is piped');
  await once(child.stdout, 'data');
  return child;
}
