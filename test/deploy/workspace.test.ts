import {
  chmodSync,
  chownSync,
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
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { createWorkspaces } from '../../src/deploy/workspace.ts';
import { useUpFiles } from '../helpers/limits.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a run has an empty directory and an empty file, for nobody else, and they go with it', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = createWorkspaces(parent, lockFile(parent));
  const [one, two] = [workspaces.make(null), workspaces.make(null)];
  t.not(one.directory, two.directory);
  t.not(one.outputFile, two.outputFile);
  t.strictSame(readdirSync(one.directory), []);
  t.equal(statSync(one.directory).mode & 0o777, 0o700);
  t.match(statSync(one.outputFile), { size: 0, mode: 0o100600 });
  const [root = ''] = runsIn(parent);
  t.equal(statSync(join(parent, root)).mode & 0o777, 0o700);

  mkdirSync(join(one.directory, 'node_modules/deep'), { recursive: true });
  writeFileSync(join(one.directory, 'node_modules/deep/file'), 'x');
  await Promise.all([one.remove(), two.remove()]);
  t.strictSame(readdirSync(join(parent, root)), []);
  await workspaces.close();
  t.strictSame(runsIn(parent), []);
});

t.test('a project with a directory of its own runs there, and keeps it', async (t) => {
  const [parent, directory] = [temporaryDirectory(t), temporaryDirectory(t)];
  const workspace = createWorkspaces(parent, lockFile(parent)).make(directory);
  t.equal(workspace.directory, directory);
  t.strictSame(readdirSync(join(parent, runsIn(parent)[0] ?? '')).length, 1, 'the file alone');
  await workspace.remove();
  t.ok(statSync(directory).isDirectory());
  t.throws(() => statSync(workspace.outputFile), { code: 'ENOENT' });
});

t.test('whatever a command makes of its files, they go', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = createWorkspaces(parent, lockFile(parent));
  const made = [workspaces.make(null), workspaces.make(null)] as const;
  for (const { directory, outputFile } of made) {
    unlinkSync(outputFile);
    rmSync(directory, { recursive: true });
  }
  mkdirSync(join(made[1].outputFile, 'inside'), { recursive: true });
  writeFileSync(made[1].directory, 'a file');
  await Promise.all(made.map(({ remove }) => remove()));
  t.strictSame(readdirSync(join(parent, runsIn(parent)[0] ?? '')), []);
});

t.test('who tidies the parent while nothing runs keeps nobody from running', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = createWorkspaces(parent, lockFile(parent));
  await workspaces.make(null).remove();
  for (const name of runsIn(parent)) rmSync(join(parent, name), { recursive: true });
  const { directory } = workspaces.make(null);
  t.strictSame(readdirSync(directory), []);
});

t.test('what a killed service left goes, and what is of another service stays', async (t) => {
  const [parent, place] = [temporaryDirectory(t), temporaryDirectory(t)];
  const [own, other] = [lockFile(place, 'own'), lockFile(place, 'other')];
  const { directory } = createWorkspaces(parent, own).make(null);
  writeFileSync(join(directory, 'left'), 'x');
  const elsewhere = createWorkspaces(parent, other).make(null);
  await createWorkspaces(parent, own).removeLeft();
  t.throws(() => statSync(directory), { code: 'ENOENT' });
  t.ok(statSync(elsewhere.directory).isDirectory());
});

t.test('a command that takes the place of all runs away keeps nobody else from running', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = createWorkspaces(parent, lockFile(parent));
  workspaces.make(null);
  const [root = ''] = runsIn(parent);
  renameSync(join(parent, root), join(parent, 'elsewhere'));
  writeFileSync(join(parent, root), 'a file');
  t.strictSame(readdirSync(workspaces.make(null).directory), []);
});

t.test('what a command put where files of a later run come to be is not used', async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = createWorkspaces(parent, lockFile(parent));
  const victim = join(parent, 'victim');
  writeFileSync(victim, 'kept');
  const link = workspaces.make(null).outputFile.replace('1.output', '2.output');
  symlinkSync(victim, link);
  const second = workspaces.make(null);
  t.not(second.outputFile, link);
  t.equal(readFileSync(victim, 'utf8'), 'kept');
  mkdirSync(
    second.directory.replace(/\d+$/, (number) => String(Number(number) + 1)),
    { mode: 0o777 },
  );
  t.equal(statSync(workspaces.make(null).directory).mode & 0o777, 0o700);
});

t.test('what others named like that stays as it is', async (t) => {
  const [parent, place] = [temporaryDirectory(t), temporaryDirectory(t)];
  const own = lockFile(place);
  createWorkspaces(parent, own).make(null);
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
  await createWorkspaces(parent, own).removeLeft();
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
      const workspace = createWorkspaces(parent, lock).make(null);
      const modules = join(workspace.directory, 'mod/cache');
      mkdirSync(modules, { recursive: true });
      writeFileSync(join(modules, 'file'), 'x', { mode: 0o444 });
      symlinkSync(parent, join(modules, 'link'));
      chmodSync(modules, 0o555);
      chmodSync(join(workspace.directory, 'mod'), 0o000);
      await workspace.remove();
      t.strictSame(readdirSync(join(parent, runsIn(parent)[0] ?? '')), []);
      t.equal(statSync(parent).mode & 0o777, 0o700, 'a link is not followed');
    } finally {
      beRoot();
    }
  },
);

t.test('what cannot be removed is told, and keeps nothing else from going', ifNobodyComesThere, async (t) => {
  const parent = temporaryDirectory(t);
  const lock = lockFile(parent);
  let beRoot = asNobody(parent);
  try {
    const workspaces = createWorkspaces(parent, lock);
    const [stuck] = [workspaces.make(null), workspaces.make(null)];
    beRoot();
    mkdirSync(join(stuck.directory, 'of-root/inside'), { recursive: true });
    beRoot = asNobody(parent);
    await t.rejects(createWorkspaces(parent, lock).removeLeft(), { code: 'EPERM' });
    t.strictSame(readdirSync(join(parent, runsIn(parent)[0] ?? '')), ['1']);
  } finally {
    beRoot();
  }
});

t.test('where nothing can be made, the system says why', (t) => {
  const parent = temporaryDirectory(t);
  const lock = lockFile(parent);
  t.throws(() => createWorkspaces(join(parent, 'missing'), lock).make(null), { code: 'ENOENT' });
  t.throws(() => createWorkspaces(lock, lock).make(null), { code: 'ENOTDIR' });
  t.end();
});

t.test('where no more files may be open it says so, and leaves nothing', ifHas('prlimit'), async (t) => {
  const parent = temporaryDirectory(t);
  const workspaces = createWorkspaces(parent, lockFile(parent));
  const release = useUpFiles();
  try {
    t.throws(() => workspaces.make(null), { code: 'EMFILE' });
  } finally {
    release();
  }
  t.strictSame(runsIn(parent), []);
  t.strictSame(readdirSync(workspaces.make(null).directory), []);
});

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
