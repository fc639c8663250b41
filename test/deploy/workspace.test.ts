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
import { pino } from 'pino';
import t from 'tap';
import type { Workspaces } from '../../src/deploy/workspace.ts';
import { newId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { testWorkspaces, until } from '../helpers/commands.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { useUpFiles } from '../helpers/limits.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const PROJECT = newId('prj', realEffects);
const OTHER_PROJECT = newId('prj', realEffects);

t.test('a run has an empty directory and an empty file, for nobody else, and they go with it', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = workspacesIn(parent, lockFile(parent));
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
  await workspaces.close();
  t.strictSame(runsIn(parent), []);
});

t.test('what a run left as it was goes to the next of its project, or after a second', async (t) => {
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
  t.not(second.outputFile, first.outputFile, 'who knows the old name writes to it in vain');
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

t.test('what is of no use goes at once: what is filled, and a second spare', async (t) => {
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

t.test(
  'the file goes to the next of a project with a directory of its own, wherever that is by then',
  async (t) => {
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
  },
);

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
    t.test(`of a run that left ${what} ${when} its end nothing is used again`, async (t) => {
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

t.test('what was filled in the moment in which it was made is not used again either', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = testWorkspaces(t, { parent, effects: fakeEffects() });
  const first = workspaces.make(PROJECT, null);
  writeFileSync(join(first.directory, 'file'), '');
  first.release();
  const second = workspaces.make(PROJECT, null);
  t.strictSame(readdirSync(second.directory), []);
  await until(() => left(parent).length === 2);
});

t.test('as long as somebody lives whom a run left, nothing is used again', async (t) => {
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

t.test('a project with a directory of its own runs there, and keeps it', async (t) => {
  const [parent, directory] = [temporaryDirectory(t), temporaryDirectory(t)];
  const workspaces = workspacesIn(parent, lockFile(parent));
  const workspace = workspaces.make(PROJECT, directory);
  t.equal(workspace.directory, directory);
  t.strictSame(readdirSync(join(parent, runsIn(parent)[0] ?? '')).length, 1, 'the file alone');
  workspace.release();
  await workspaces.close();
  t.ok(statSync(directory).isDirectory());
  t.throws(() => statSync(workspace.outputFile), { code: 'ENOENT' });
});

t.test('whatever a command makes of its files, they go', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = workspacesIn(parent, lockFile(parent));
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

t.test('who tidies the parent while nothing runs keeps nobody from running', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = workspacesIn(parent, lockFile(parent));
  workspaces.make(PROJECT, null).release();
  for (const name of runsIn(parent)) rmSync(join(parent, name), { recursive: true });
  const { directory } = workspaces.make(PROJECT, null);
  t.strictSame(readdirSync(directory), []);
});

t.test('what a killed service left goes, and what is of another service stays', async (t) => {
  const [parent, place] = [temporaryDirectory(t), temporaryDirectory(t)];
  const [own, other] = [lockFile(place, 'own'), lockFile(place, 'other')];
  const { directory } = workspacesIn(parent, own).make(PROJECT, null);
  writeFileSync(join(directory, 'left'), 'x');
  const elsewhere = workspacesIn(parent, other).make(PROJECT, null);
  await workspacesIn(parent, own).removeLeft();
  t.throws(() => statSync(directory), { code: 'ENOENT' });
  t.ok(statSync(elsewhere.directory).isDirectory());
});

t.test('a command that takes the place of all runs away keeps nobody else from running', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = workspacesIn(parent, lockFile(parent));
  workspaces.make(PROJECT, null);
  const [root = ''] = runsIn(parent);
  renameSync(join(parent, root), join(parent, 'elsewhere'));
  writeFileSync(join(parent, root), 'a file');
  t.strictSame(readdirSync(workspaces.make(PROJECT, null).directory), []);
});

t.test('what a command put where files of a later run come to be is not used', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = workspacesIn(parent, lockFile(parent));
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

t.test('what others named like that stays as it is', async (t) => {
  const [parent, place] = [temporaryDirectory(t), temporaryDirectory(t)];
  const own = lockFile(place);
  workspacesIn(parent, own).make(PROJECT, null);
  const [root = ''] = runsIn(parent);
  const prefix = root.slice(0, -6);
  const strange = ['linked', 'opened', 'a-file', ...(ifMayBeNobody().skip === undefined ? ['given'] : [])];
  mkdirSync(join(place, 'kept'), { mode: 0o700 });
  writeFileSync(join(place, 'kept/file'), '');
  symlinkSync(join(place, 'kept'), join(parent, `${prefix}linked`));
  mkdirSync(join(parent, `${prefix}opened`));
  chmodSync(join(parent, `${prefix}opened`), 0o777);
  writeFileSync(join(parent, `${prefix}a-file`), '', { mode: 0o600 });
  if (strange.includes('given')) {
    mkdirSync(join(parent, `${prefix}given`), { mode: 0o700 });
    chownSync(join(parent, `${prefix}given`), 65_534, 65_534);
  }
  await workspacesIn(parent, own).removeLeft();
  t.strictSame(runsIn(parent).sort(), strange.map((name) => prefix + name).sort());
  t.strictSame(readdirSync(join(place, 'kept')), ['file'], 'a link is not followed');
});

const ifNobodyComesThere = ifMayBeNobody(`${tmpdir()}/.`);

t.test(
  'a tree in which nobody may write goes too',
  process.getuid?.() === 0 ? ifNobodyComesThere : {},
  async (t) => {
    const parent = temporaryDirectory(t);
    const lock = lockFile(parent);
    const beRoot = asNobody(parent);
    try {
      const workspace = workspacesIn(parent, lock).make(PROJECT, null);
      const modules = join(workspace.directory, 'mod/cache');
      mkdirSync(modules, { recursive: true });
      writeFileSync(join(modules, 'file'), 'x', { mode: 0o444 });
      symlinkSync(parent, join(modules, 'link'));
      chmodSync(modules, 0o555);
      chmodSync(join(workspace.directory, 'mod'), 0o000);
      workspace.release();
      await until(() => left(parent).length === 0);
      t.equal(statSync(parent).mode & 0o777, 0o700, 'a link is not followed');

      const { outputFile } = workspacesIn(parent, lock).make(PROJECT, null);
      chmodSync(dirname(outputFile), 0o000);
      await workspacesIn(parent, lock).removeLeft();
      t.strictSame(runsIn(parent), [], 'by the next start');
    } finally {
      beRoot();
    }
  },
);

t.test('what takes long to remove keeps no stop waiting, and the next start goes on with it', async (t) => {
  const parent = temporaryDirectory(t);
  const lock = lockFile(parent);
  const effects = fakeEffects();
  const workspaces = testWorkspaces(t, { parent, lockPath: lock, effects });
  const { rmdir: remove } = fs;
  fs.rmdir = Object.assign(() => undefined, remove);
  syncBuiltinESMExports();
  try {
    workspaces.make(PROJECT, null).release();
    const closed = workspaces.close();
    effects.advance(1_000);
    await closed;
  } finally {
    fs.rmdir = remove;
    syncBuiltinESMExports();
  }
  t.equal(runsIn(parent).length, 1);
  await workspacesIn(parent, lock).removeLeft();
  t.equal(runsIn(parent).length, 0);
});

t.test('what cannot be removed is told, and keeps nothing else from going', ifNobodyComesThere, async (t) => {
  const parent = temporaryDirectory(t);
  const lock = lockFile(parent);
  let beRoot = asNobody(parent);
  try {
    const workspaces = workspacesIn(parent, lock);
    const [stuck] = [workspaces.make(PROJECT, null), workspaces.make(PROJECT, null)];
    beRoot();
    mkdirSync(join(stuck.directory, 'of-root/inside'), { recursive: true });
    beRoot = asNobody(parent);
    await t.rejects(workspacesIn(parent, lock).removeLeft(), { code: 'EPERM' });
    t.strictSame(readdirSync(join(parent, runsIn(parent)[0] ?? '')), ['1']);
  } finally {
    beRoot();
  }
});

t.test(
  'a file that cannot be removed is told, and keeps its directory from nothing',
  ifNobodyComesThere,
  async (t) => {
    const parent = temporaryDirectory(t);
    const lines: { msg: string; err: { code: string } }[] = [];
    const workspaces = testWorkspaces(t, {
      parent,
      lockPath: lockFile(parent),
      logger: pino({}, { write: (line) => void lines.push(JSON.parse(line)) }),
    });
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

      t.match(lines, [
        { msg: 'files of a run are left behind', path: one.directory, err: { code: /^(?:EACCES|EPERM)$/ } },
      ]);

      writeFileSync(two.outputFile, 'name=value\n');
      chmodSync(dirname(two.outputFile), 0o500);
      two.release();
      await until(() => !existsSync(two.outputFile)); // a command may have closed what it is in
    } finally {
      beRoot();
    }
  },
);

t.test('where a directory cannot be made no file is left', ifNobodyComesThere, async (t) => {
  const parent = temporaryDirectory(t);
  const lock = lockFile(parent);
  const beRoot = asNobody(parent);
  try {
    const workspaces = workspacesIn(parent, lock);
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

t.test('where nothing can be made, the system says why', (t) => {
  const parent = temporaryDirectory(t);
  const lock = lockFile(parent);
  t.throws(() => workspacesIn(join(parent, 'missing'), lock).make(PROJECT, null), { code: 'ENOENT' });
  t.throws(() => workspacesIn(lock, lock).make(PROJECT, null), { code: 'ENOTDIR' });
  t.end();
});

t.test('where no more files may be open it says so, and leaves nothing', ifHas('prlimit'), async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = workspacesIn(parent, lockFile(parent));
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

function workspacesIn(parent: string, lockPath: string): Workspaces {
  return testWorkspaces(t, { parent, lockPath });
}

function inodesOf({ directory, outputFile }: { directory: string; outputFile: string }): number[] {
  return [directory, outputFile].map((path) => statSync(path).ino);
}

/** What there is of runs. */
function left(parent: string): string[] {
  return runsIn(parent).flatMap((root) => readdirSync(join(parent, root)));
}

function lockFile(directory: string, name = 'lock'): string {
  const path = join(directory, name);
  writeFileSync(path, '');
  return path;
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
