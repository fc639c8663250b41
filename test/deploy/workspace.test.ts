import { execFileSync } from 'node:child_process';
import fs, {
  chmodSync,
  chownSync,
  existsSync,
  linkSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  unlinkSync,
  writeFileSync,
} from 'node:fs';
import { rmdir } from 'node:fs/promises';
import { syncBuiltinESMExports } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import t from 'tap';
import { parentProblem } from '../../src/deploy/workspace.ts';
import { newId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { testWorkspaces, until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { keptLog } from '../helpers/kept-log.ts';
import { useUpFiles } from '../helpers/limits.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const PROJECT = newId('prj', realEffects);
const OTHER_PROJECT = newId('prj', realEffects);

t.test('a run has a private empty directory and output file, which are removed with it', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent });
  const [one, two] = [workspaces.make(PROJECT, null), workspaces.make(PROJECT, null)];
  t.not(one.directory, two.directory);
  t.not(one.outputFile, two.outputFile);
  t.strictSame(readdirSync(one.directory), []);
  t.equal(statSync(one.directory).mode & 0o777, 0o700);
  t.match(statSync(one.outputFile), { size: 0, mode: 0o100600 });
  const [root = ''] = runsIn(parent);
  t.equal(statSync(join(parent, root)).mode & 0o777, 0o700);

  mkdirSync(join(one.directory, 'node_modules/deep'), { recursive: true });
  writeFileSync(join(one.directory, 'node_modules/deep/file'), 'x');
  one.release();
  two.release();
  await workspaces.close(1_000);
  t.strictSame(runsIn(parent), []);
});

t.test('an unused directory goes to the next run of its project, or is removed after a second', async (t) => {
  const parent = temporaryDirectory(t);
  const effects = fakeEffects();
  const workspaces = testWorkspaces(t, { parent, effects });
  const first = workspaces.make(PROJECT, null);
  const inodes = inodesOf(first);
  first.release();
  const other = workspaces.make(OTHER_PROJECT, null);
  t.not(other.directory, first.directory, "not another project's");
  effects.advance(999);
  const second = workspaces.make(PROJECT, null);
  t.equal(second.directory, first.directory);
  t.strictSame(inodesOf(second), inodes);
  t.not(second.outputFile, first.outputFile, 'the old name is gone');
  t.throws(() => statSync(first.outputFile), { code: 'ENOENT' });

  effects.advance(10_000);
  mkdirSync(join(parent, 'removed after it'));
  await rmdir(join(parent, 'removed after it'));
  t.strictSame(inodesOf(second), inodes, 'as long as it has them they stay');
  second.release();
  effects.advance(1_000);
  await until(() => left(parent).length === 2);
  t.not(workspaces.make(PROJECT, null).outputFile, second.outputFile);
});

t.test('a used directory, and a second spare one, are removed at once', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent, effects: fakeEffects() });
  const filled = workspaces.make(PROJECT, null);
  await clockTick(filled.directory);
  writeFileSync(join(filled.directory, 'file'), '');
  filled.release();
  await until(() => left(parent).length === 0);
  const told = workspaces.make(PROJECT, null);
  writeFileSync(told.outputFile, 'name=value\n');
  told.release();
  await until(() => left(parent).length === 0);
  const [one, two] = [workspaces.make(PROJECT, null), workspaces.make(PROJECT, null)];
  one.release();
  two.release();
  await until(() => left(parent).length === 2);
});

t.test('an unused output file is reused by a project with its own directory, wherever that is', async (t) => {
  const [parent, one, two] = [temporaryDirectory(t), temporaryDirectory(t), temporaryDirectory(t)];
  const workspaces = testWorkspaces(t, { parent, effects: fakeEffects() });
  const first = workspaces.make(PROJECT, one);
  const { ino } = statSync(first.outputFile);
  first.release();
  const second = workspaces.make(PROJECT, two);
  t.match(second, { directory: two });
  t.equal(statSync(second.outputFile).ino, ino);
  second.release();
  const third = workspaces.make(PROJECT, null);
  t.not(third.directory, two);
  t.strictSame(readdirSync(third.directory), []);
  third.release();
  t.equal(workspaces.make(PROJECT, one).directory, one);
  await until(() => left(parent).length === 1);
});

const changes: Record<string, (files: { directory: string; outputFile: string }) => void> = {
  'a file': ({ directory }) => writeFileSync(join(directory, 'file'), ''),
  'a directory': ({ directory }) => mkdirSync(join(directory, 'directory')),
  'a directory that others may enter': ({ directory }) => chmodSync(directory, 0o755),
  'a directory that others entered for a while': ({ directory }) => {
    chmodSync(directory, 0o777);
    chmodSync(directory, 0o700);
  },
  'no directory': ({ directory }) => rmSync(directory, { recursive: true }),
  'a link to a directory': ({ directory }) => {
    renameSync(directory, `${directory}-moved`);
    symlinkSync(`${directory}-moved`, directory);
  },
  outputs: ({ outputFile }) => writeFileSync(outputFile, 'name=value\n'),
  'an output file that others may read': ({ outputFile }) => chmodSync(outputFile, 0o644),
  ...(ifMayBeNobody().skip === undefined
    ? { "another user's output file": ({ outputFile }) => chownSync(outputFile, 65_534, 65_534) }
    : {}),
  'no output file': ({ outputFile }) => unlinkSync(outputFile),
  'an output file with a second name': ({ outputFile }) => linkSync(outputFile, `${outputFile}-too`),
  'a link to an output file': ({ outputFile }) => {
    renameSync(outputFile, `${outputFile}-moved`);
    symlinkSync(`${outputFile}-moved`, outputFile);
  },
  'a directory for outputs': ({ outputFile }) => {
    unlinkSync(outputFile);
    mkdirSync(outputFile);
  },
  'a named pipe for outputs': ({ outputFile }) => {
    unlinkSync(outputFile);
    execFileSync('mkfifo', ['-m', '600', outputFile]);
  },
};

for (const [what, change] of Object.entries(changes)) {
  for (const when of ['before', 'after'] as const) {
    t.test(`nothing of a run that left ${what} ${when} its end is reused`, async (t) => {
      const parent = temporaryDirectory(t);
      const workspaces = testWorkspaces(t, { parent, effects: fakeEffects() });
      const first = workspaces.make(PROJECT, null);
      await clockTick(first.directory);
      if (when === 'before') change(first);
      first.release();
      if (when === 'after') change(first);
      const second = workspaces.make(PROJECT, null);
      t.not(second.directory, first.directory);
      t.strictSame(readdirSync(second.directory), []);
      t.match(statSync(second.directory), { mode: 0o040700 });
      t.match(lstatSync(second.outputFile), { mode: 0o100600, size: 0, nlink: 1 });
      await until(() => !existsSync(first.directory) && !existsSync(first.outputFile));
    });
  }
}

t.test('a directory filled in the clock tick of its creation is not reused', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent, effects: fakeEffects() });
  const first = workspaces.make(PROJECT, null);
  writeFileSync(join(first.directory, 'file'), '');
  first.release();
  const second = workspaces.make(PROJECT, null);
  t.strictSame(readdirSync(second.directory), []);
  await until(() => left(parent).length === 2);
});

t.test('while an orphan of a run lives, nothing is reused', async (t) => {
  let hasOrphans = true;
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent, effects: fakeEffects(), hasOrphans: () => hasOrphans });
  const first = workspaces.make(PROJECT, null);
  first.release();
  const second = workspaces.make(PROJECT, null);
  // By its path: what is made may be given the inode of what was removed.
  t.not(second.directory, first.directory);
  await until(() => left(parent).length === 2);
  hasOrphans = false;
  const kept = inodesOf(second);
  second.release();
  const third = workspaces.make(PROJECT, null);
  t.equal(third.directory, second.directory);
  t.strictSame(inodesOf(third), kept);
});

t.test('a project with its own directory runs there and keeps it', async (t) => {
  const [parent, directory] = [temporaryDirectory(t), temporaryDirectory(t)];
  const workspaces = testWorkspaces(t, { parent });
  const workspace = workspaces.make(PROJECT, directory);
  t.equal(workspace.directory, directory);
  t.strictSame(readdirSync(join(parent, runsIn(parent)[0] ?? '')).length, 1, 'the file alone');
  workspace.release();
  await workspaces.close(1_000);
  t.ok(statSync(directory).isDirectory());
  t.throws(() => statSync(workspace.outputFile), { code: 'ENOENT' });
});

t.test('the files of a run are removed whatever a command made of them', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent });
  const made = [workspaces.make(PROJECT, null), workspaces.make(PROJECT, null)] as const;
  for (const { directory, outputFile } of made) {
    unlinkSync(outputFile);
    rmSync(directory, { recursive: true });
  }
  mkdirSync(join(made[1].outputFile, 'inside'), { recursive: true });
  writeFileSync(made[1].directory, 'a file');
  for (const { release } of made) release();
  await until(() => left(parent).length === 0);
});

t.test('runs go on after somebody has emptied the parent directory', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent });
  workspaces.make(PROJECT, null).release();
  for (const name of runsIn(parent)) rmSync(join(parent, name), { recursive: true });
  const { directory } = workspaces.make(PROJECT, null);
  t.strictSame(readdirSync(directory), []);
});

t.test('directories left by a killed service are removed, those of other services stay', async (t) => {
  const [parent, own, other] = [temporaryDirectory(t), temporaryDirectory(t), temporaryDirectory(t)];
  const { directory } = testWorkspaces(t, { parent, lockPath: own }).make(PROJECT, null);
  writeFileSync(join(directory, 'left'), 'x');
  const elsewhere = testWorkspaces(t, { parent, lockPath: other }).make(PROJECT, null);
  await testWorkspaces(t, { parent, lockPath: own }).removeLeft();
  t.throws(() => statSync(directory), { code: 'ENOENT' });
  t.ok(statSync(elsewhere.directory).isDirectory());
  await t.resolves(
    testWorkspaces(t, { parent: join(parent, 'missing'), lockPath: own }).removeLeft(),
    'without a directory, nothing is left',
  );
});

t.test('replacing the directory of all runs by a file does not keep others from running', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent });
  workspaces.make(PROJECT, null);
  const [root = ''] = runsIn(parent);
  renameSync(join(parent, root), join(parent, 'elsewhere'));
  writeFileSync(join(parent, root), 'a file');
  t.strictSame(readdirSync(workspaces.make(PROJECT, null).directory), []);
});

t.test('files placed at the paths of a later run are not used', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent });
  const victim = join(parent, 'victim');
  writeFileSync(victim, 'kept');
  const link = workspaces.make(PROJECT, null).outputFile.replace('1.output', '2.output');
  symlinkSync(victim, link);
  const second = workspaces.make(PROJECT, null);
  t.not(second.outputFile, link);
  t.equal(readFileSync(victim, 'utf8'), 'kept');
  mkdirSync(
    second.directory.replace(/\d+$/, (number) => String(Number(number) + 1)),
    { mode: 0o777 },
  );
  t.equal(statSync(workspaces.make(PROJECT, null).directory).mode & 0o777, 0o700);
});

t.test('similarly named files of others stay untouched', async (t) => {
  const [parent, place] = [temporaryDirectory(t), temporaryDirectory(t)];
  testWorkspaces(t, { parent }).make(PROJECT, null);
  const [root = ''] = runsIn(parent);
  const prefix = root.slice(0, -6);
  const strange = ['linked', 'opened', 'a-file', ...(ifMayBeNobody().skip === undefined ? ['given'] : [])];
  mkdirSync(join(place, 'kept'), { mode: 0o700 });
  writeFileSync(join(place, 'kept/file'), '');
  symlinkSync(join(place, 'kept'), join(parent, `${prefix}linked`));
  mkdirSync(join(parent, `${prefix}opened`));
  chmodSync(join(parent, `${prefix}opened`), 0o770);
  writeFileSync(join(parent, `${prefix}a-file`), '', { mode: 0o600 });
  if (strange.includes('given')) {
    mkdirSync(join(parent, `${prefix}given`), { mode: 0o700 });
    chownSync(join(parent, `${prefix}given`), 65_534, 65_534);
  }
  await testWorkspaces(t, { parent }).removeLeft();
  t.strictSame(runsIn(parent).sort(), strange.map((name) => prefix + name).sort());
  t.strictSame(readdirSync(join(place, 'kept')), ['file'], 'a link is not followed');
});

const ifNobodyComesThere = ifMayBeNobody(`${tmpdir()}/.`);

t.test(
  'a tree without write permission is removed',
  process.getuid?.() === 0 ? ifNobodyComesThere : {},
  async (t) => {
    const parent = temporaryDirectory(t);
    const beRoot = asNobody(parent);
    try {
      const workspace = testWorkspaces(t, { parent }).make(PROJECT, null);
      const modules = join(workspace.directory, 'mod/cache');
      mkdirSync(modules, { recursive: true });
      writeFileSync(join(modules, 'file'), 'x', { mode: 0o444 });
      symlinkSync(parent, join(modules, 'link'));
      chmodSync(modules, 0o555);
      chmodSync(join(workspace.directory, 'mod'), 0o000);
      workspace.release();
      await until(() => left(parent).length === 0);
      t.equal(statSync(parent).mode & 0o777, 0o700, 'a link is not followed');

      const { outputFile } = testWorkspaces(t, { parent }).make(PROJECT, null);
      chmodSync(dirname(outputFile), 0o000);
      await testWorkspaces(t, { parent }).removeLeft();
      t.strictSame(runsIn(parent), [], 'by the next start');
    } finally {
      beRoot();
    }
  },
);

t.test('the files of runs are made also when somebody has removed the lock file', async (t) => {
  const lock = join(temporaryDirectory(t), 'lock');
  writeFileSync(lock, '');
  const workspaces = testWorkspaces(t, { lockPath: lock });
  rmSync(lock);
  t.ok(existsSync(workspaces.make(PROJECT, null).directory));
});

t.test('a slow removal does not delay a shutdown, and the next start resumes it', async (t) => {
  const parent = temporaryDirectory(t);
  const effects = fakeEffects();
  const workspaces = testWorkspaces(t, { parent, effects });
  const { rmdir: remove } = fs;
  fs.rmdir = Object.assign(() => undefined, remove);
  syncBuiltinESMExports();
  try {
    workspaces.make(PROJECT, null).release();
    const closed = workspaces.close(1_000);
    effects.advance(1_000);
    await closed;
  } finally {
    fs.rmdir = remove;
    syncBuiltinESMExports();
  }
  t.equal(runsIn(parent).length, 1);
  await testWorkspaces(t, { parent }).removeLeft();
  t.equal(runsIn(parent).length, 0);
});

t.test('a directory that cannot be removed is reported, others go', ifNobodyComesThere, async (t) => {
  const parent = temporaryDirectory(t);
  let beRoot = asNobody(parent);
  try {
    const workspaces = testWorkspaces(t, { parent });
    const [stuck] = [workspaces.make(PROJECT, null), workspaces.make(PROJECT, null)];
    beRoot();
    mkdirSync(join(stuck.directory, 'of-root/inside'), { recursive: true });
    beRoot = asNobody(parent);
    await t.rejects(testWorkspaces(t, { parent }).removeLeft(), { code: 'EPERM' });
    t.strictSame(readdirSync(join(parent, runsIn(parent)[0] ?? '')), ['1']);
  } finally {
    beRoot();
  }
});

t.test(
  'a file that cannot be removed is reported, and its directory is removed',
  ifNobodyComesThere,
  async (t) => {
    const parent = temporaryDirectory(t);
    const { logger, lines } = keptLog<{ msg: string; path: string; err: { code: string } }>();
    const workspaces = testWorkspaces(t, { parent, logger });
    const beRoot = asNobody(parent);
    try {
      const [one, two] = [workspaces.make(PROJECT, null), workspaces.make(PROJECT, parent)];
      beRoot();
      unlinkSync(one.outputFile);
      mkdirSync(join(one.outputFile, 'of-root'), { recursive: true });
      asNobody(parent);
      one.release();
      await until(() => lines.length === 1);
      t.notOk(existsSync(one.directory));

      t.match(lines[0], { msg: 'files of a run are left behind', err: { code: /^(?:EACCES|EPERM)$/ } });
      t.equal(lines[0]?.path, one.directory);

      writeFileSync(two.outputFile, 'name=value\n');
      chmodSync(dirname(two.outputFile), 0o500);
      two.release();
      await until(() => !existsSync(two.outputFile)); // a command may have closed what it is in
    } finally {
      beRoot();
    }
  },
);

t.test('no file is left if the directory cannot be created', ifNobodyComesThere, async (t) => {
  const parent = temporaryDirectory(t);
  const beRoot = asNobody(parent);
  try {
    const workspaces = testWorkspaces(t, { parent });
    const { directory } = workspaces.make(PROJECT, null);
    mkdirSync(directory.replace(/\d+$/, (number) => String(Number(number) + 1)));
    chmodSync(parent, 0o500);
    const before = left(parent);
    t.throws(() => workspaces.make(PROJECT, null), { code: 'EACCES' });
    t.strictSame(left(parent), before);
  } finally {
    chmodSync(parent, 0o700);
    beRoot();
  }
});

t.test('trying whether anything can be created leaves nothing', async (t) => {
  const parent = temporaryDirectory(t);
  t.equal(parentProblem(parent), undefined);
  t.strictSame(readdirSync(parent), []);
  t.match(parentProblem(join(parent, 'missing')), { message: /ENOENT/, mayPass: false });
});

t.test('if nothing can be created, the error is that of the system', (t) => {
  const directory = temporaryDirectory(t);
  const [missing, file] = [join(directory, 'missing'), join(directory, 'file')];
  writeFileSync(file, '');
  const make = (parent: string) => testWorkspaces(t, { parent, lockPath: directory }).make(PROJECT, null);
  t.throws(() => make(missing), { code: 'ENOENT' });
  t.throws(() => make(file), { code: 'ENOTDIR' });
  t.end();
});

t.test('creating without free file descriptors fails and leaves nothing', ifHas('prlimit'), async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent });
  const release = useUpFiles();
  try {
    t.throws(() => workspaces.make(PROJECT, null), { code: 'EMFILE' });
  } finally {
    release();
  }
  t.strictSame(runsIn(parent), []);
  t.strictSame(readdirSync(workspaces.make(PROJECT, null).directory), []);
});

/** A coarse clock of the file system tells no two moments of one tick apart: ext4's before Linux 6.13, at 100 a second. */
async function clockTick(made: string): Promise<void> {
  await until(() => Date.now() > statSync(made).birthtimeMs + 10);
}

function inodesOf({ directory, outputFile }: { directory: string; outputFile: string }): number[] {
  return [directory, outputFile].map((path) => statSync(path).ino);
}

/** What there is of runs. */
function left(parent: string): string[] {
  return runsIn(parent).flatMap((root) => readdirSync(join(parent, root)));
}

/** Root may write everywhere: until the returned function is called it is a user whose directory this is. */
function asNobody(directory: string): () => void {
  if (process.getuid?.() !== 0) return () => undefined;
  chownSync(directory, 65_534, 65_534);
  process.seteuid?.(65_534);
  return () => process.seteuid?.(0);
}

function runsIn(parent: string): string[] {
  return readdirSync(parent).filter((name) => name.startsWith('davit-runs-'));
}
