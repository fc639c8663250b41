import { execSync, spawnSync } from 'node:child_process';
import { chmodSync, chownSync, mkdirSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { busyWriter } from '../helpers/busy.ts';
import { MAIN, place } from '../helpers/cli.ts';
import { findingOf, type Report, reportOf, withProject } from '../helpers/doctor.ts';
import { changeFile } from '../helpers/files.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';

const ifMayBeSomebodyElse = process.getuid?.() === 0 ? {} : { skip: 'needs root' };

t.test('a database that others have access to or can replace is a problem', async (t) => {
  const there = await withProject(t);
  for (const mode of ['644', '640', '602', '2610']) {
    chmodSync(there.dbPath, Number.parseInt(mode, 8));
    t.match(findingOf(await reportOf(t, there, 1), 'permissions'), {
      level: 'problem',
      message: `others have access to davit.db (mode ${mode})`,
      advice: /^chmod 600 \/.*\/davit\.db$/,
    });
  }
  chmodSync(there.dbPath, 0o600);
  for (const mode of ['777', '770', '702']) {
    chmodSync(there.directory, Number.parseInt(mode, 8));
    t.match(findingOf(await reportOf(t, there, 1), 'permissions'), {
      level: 'problem',
      message: new RegExp(`^others can replace the file, as they can write to /.* \\(mode ${mode}\\)$`),
      advice: /^chmod go-w \//,
    });
  }
  chmodSync(there.directory, 0o1777);
  await reportOf(t, there, 0);
  const kept = `${there.dbPath}.before-restore-2026-11-20T10-00-00.000Z`;
  writeFileSync(kept, '');
  chmodSync(kept, 0o644); // whatever the umask
  t.match(findingOf(await reportOf(t, there, 1), 'permissions'), {
    level: 'problem',
    message: /^others have access to davit\.db\.before-restore-\S+ \(mode 644\)$/,
    advice: `chmod 600 ${kept}`,
  });
  chmodSync(kept, 0o600);

  await (await busyWriter(t, there.dbPath)).kill();
  for (const side of ['-wal', '-shm']) chmodSync(there.dbPath + side, 0o644);
  const { findings } = await reportOf(t, there, 1);
  t.strictSame(
    findings.filter(({ check }) => check === 'permissions').map(({ message }) => message),
    ['others have access to davit.db-wal (mode 644)', 'others have access to davit.db-shm (mode 644)'],
  );
});

t.test('a database that its owner may not write to is a problem', async (t) => {
  const there = await withProject(t);
  chmodSync(there.dbPath, 0o400);
  t.match(findingOf(await reportOf(t, there, 1), 'permissions'), {
    level: 'problem',
    message: 'davit.db is not writable (mode 400)',
    advice: /^chmod 600 \/.*\/davit\.db$/,
  });
});

t.test('advice can be pasted into a shell, whatever the path', async (t) => {
  const { davit, directory } = place(t);
  const home = join(directory, "it's my app");
  const dbPath = join(home, 'davit.db');
  mkdirSync(home);
  await davit(['admin', 'project', 'create', '--name', 'website', '--db', dbPath]);
  chmodSync(home, 0o777);
  chmodSync(dbPath, 0o444);
  const { stdout } = await davit(['doctor', '--json', '--db', dbPath]);
  const { findings }: Report = JSON.parse(stdout);
  for (const { advice } of findings.filter(({ level }) => level === 'problem')) execSync(String(advice));
  t.strictSame([statSync(home).mode & 0o777, statSync(dbPath).mode & 0o777], [0o755, 0o600]);
});

t.test('a side file that belongs to another user is a problem', ifMayBeSomebodyElse, async (t) => {
  const there = await withProject(t);
  writeFileSync(`${there.dbPath}-lock`, '', { mode: 0o600 });
  chownSync(`${there.dbPath}-lock`, 65_534, 65_534);
  t.match(findingOf(await reportOf(t, there, 1), 'permissions'), {
    message: 'davit.db-lock belongs to another user than davit.db: the service may not be able to write',
    advice: /^chown --reference=/,
  });
});

t.test('a file in the directory of another user is a problem', ifMayBeSomebodyElse, async (t) => {
  const there = await withProject(t);
  chownSync(there.directory, 65_534, 65_534);
  writeFileSync(`${there.dbPath}-lock`, '', { mode: 0o600 });
  const { message, advice, level } = findingOf(await reportOf(t, there, 1), 'permissions') ?? {};
  t.equal(level, 'problem');
  t.equal(
    message,
    `davit.db belongs to another user than ${there.directory}: a service of that user cannot open it`,
  );
  t.match(advice, /^chown -h --reference=/);
  execSync(String(advice));
  for (const path of [there.dbPath, `${there.dbPath}-lock`]) t.equal(statSync(path).uid, 65_534);
  t.match((await reportOf(t, there, 0)).findings[0], { check: 'permissions', level: 'note' });
});

t.test('a database that belongs to another user is a note', ifMayBeSomebodyElse, async (t) => {
  const there = await withProject(t);
  chownSync(there.dbPath, 65_534, 65_534);
  t.match((await reportOf(t, there, 0)).findings[0], {
    check: 'permissions',
    level: 'note',
    message: /^the file belongs to another user/,
    advice: `run it as that user: sudo -u nobody davit doctor --db ${there.dbPath}`,
  });
});

t.test(
  'a directory in which the owner of the file may create nothing is a problem',
  ifMayBeNobody(process.execPath, MAIN, `${tmpdir()}/.`),
  async (t) => {
    const there = await withProject(t);
    changeFile(there.dbPath, 'PRAGMA journal_mode = DELETE'); // as a backup has it: to read it takes no other file
    chmodSync(there.directory, 0o755);
    chownSync(there.dbPath, 65_534, 65_534);
    const somebody = ['--reuid=65534', '--regid=65534', '--clear-groups', process.execPath, MAIN];
    const { stdout } = spawnSync('setpriv', [...somebody, 'doctor', '--json', '--db', there.dbPath], {
      env: {},
      encoding: 'utf8',
    });
    t.match(findingOf(JSON.parse(stdout), 'permissions'), {
      level: 'problem',
      message: /^this user cannot create files in \/\S+ \(mode 755\), where -wal and -lock belong$/,
      advice: /^move the file into a directory of this user's own/,
    });
  },
);
