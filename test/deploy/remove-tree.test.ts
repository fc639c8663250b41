import { execFileSync } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  readdirSync,
  renameSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import fs from 'node:fs/promises';
import { syncBuiltinESMExports } from 'node:module';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { removeTree } from '../../src/deploy/remove-tree.ts';
import { limitOpenFiles } from '../helpers/limits.ts';
import { ifHas } from '../helpers/programs.ts';
import { ifMayMount } from '../helpers/small-disk.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/** A directory to be removed, and one beside it that must stay. */
function place(t: Test) {
  const around = temporaryDirectory(t);
  const [tree, kept] = [join(around, 'tree'), join(around, 'kept')];
  for (const path of [tree, kept]) mkdirSync(path);
  return { around, tree, kept };
}

/** Does `change` just before the call to the file system with this number; resolves with how many there were. */
async function duringCall(number: number, act: () => Promise<void>, change: () => void): Promise<number> {
  const actual = { ...fs };
  let calls = 0;
  for (const name of ['open', 'readdir', 'rmdir', 'unlink'] as const) {
    const call = actual[name] as (...values: unknown[]) => Promise<unknown>;
    Object.assign(fs, {
      [name]: (...values: unknown[]) => {
        calls += 1;
        if (calls === number) change();
        return call(...values);
      },
    });
  }
  syncBuiltinESMExports();
  try {
    await act();
  } finally {
    Object.assign(fs, actual);
    syncBuiltinESMExports();
  }
  return calls;
}

t.test('a file, a link and a tree are removed, and the target of a link stays', async (t) => {
  const { around, tree, kept } = place(t);
  writeFileSync(join(kept, 'file'), '');
  mkdirSync(join(tree, 'in/side'), { recursive: true });
  writeFileSync(join(tree, 'in/side/file'), '', { mode: 0o000 });
  writeFileSync(Buffer.concat([Buffer.from(`${tree}/`), Buffer.from([0xff, 0x0a])]), '');
  symlinkSync(kept, join(tree, 'in/link'));
  symlinkSync(kept, join(around, 'link'));
  writeFileSync(join(around, 'file'), '');
  for (const name of ['tree', 'link', 'file', 'never-there']) await removeTree(join(around, name));
  t.strictSame(readdirSync(around), ['kept']);
  t.strictSame(readdirSync(kept), ['file']);
});

t.test('a directory swapped for a link at any moment is not followed', async (t) => {
  let moments = 1;
  for (let moment = 0; moment <= moments; moment++) {
    const { around, tree, kept } = place(t);
    const swapped = join(tree, 'swapped');
    mkdirSync(swapped);
    for (const path of [kept, swapped]) writeFileSync(join(path, 'file'), '');
    const swap = () => {
      if (!existsSync(swapped)) return;
      renameSync(swapped, join(around, 'elsewhere'));
      symlinkSync(kept, swapped);
    };
    const calls = await duringCall(moment, () => removeTree(tree).catch(() => undefined), swap);
    if (moment === 0) moments = calls;
    t.strictSame(readdirSync(kept), ['file'], `before call ${moment} of ${moments}`);
    await removeTree(tree);
    t.notOk(existsSync(tree));
  }
});

t.test('whatever fails is told by its own error, and no file is left open', async (t) => {
  const fail = () => {
    throw Object.assign(new Error('EIO'), { code: 'EIO' });
  };
  let moments = 1;
  for (let moment = 0; moment <= moments; moment++) {
    const { tree } = place(t);
    mkdirSync(join(tree, 'in'));
    for (const path of [tree, join(tree, 'in')]) writeFileSync(join(path, 'file'), '');
    const openBefore = readdirSync('/proc/self/fd');
    const removal = duringCall(moment, () => removeTree(tree), fail);
    if (moment === 0) moments = await removal;
    else await t.rejects(removal, { code: 'EIO' }, `call ${moment} of ${moments}`);
    t.strictSame(readdirSync('/proc/self/fd'), openBefore);
    await removeTree(tree);
    t.notOk(existsSync(tree));
  }
});

t.test(
  'a tree deeper than any path can be long is removed with few files open, also without permissions',
  ifHas('prlimit'),
  async (t) => {
    const { around, tree } = place(t);
    const start = process.cwd();
    process.chdir(tree);
    try {
      for (let depth = 0; depth < 600; depth++) {
        mkdirSync('directory');
        writeFileSync('file', '');
        process.chdir('directory');
        if (depth % 100 === 0) chmodSync('..', 0o500);
      }
    } finally {
      process.chdir(start);
    }
    const openBefore = readdirSync('/proc/self/fd');
    const lift = limitOpenFiles(128);
    await removeTree(tree).finally(lift);
    t.strictSame(readdirSync('/proc/self/fd'), openBefore);
    t.strictSame(readdirSync(around), ['kept']);
  },
);

t.test('a mount inside a tree stays and is reported, and all around it is removed', ifMayMount, (t) => {
  const { around, tree, kept } = place(t);
  for (let number = 1; number <= 20; number++) mkdirSync(join(tree, `${number}`));
  const [there] = readdirSync(tree); // it fails before most of the others are removed
  writeFileSync(join(kept, 'file'), '');
  const module = import.meta.resolve('../../src/deploy/remove-tree.ts');
  const script = `import { removeTree } from ${JSON.stringify(module)};
    await removeTree(${JSON.stringify(tree)}).catch((error) => console.log(error.message));`;
  const said = execFileSync(
    'unshare',
    [
      '-rm',
      'sh',
      '-ec',
      'mount --bind kept "$2"; "$0" --input-type=module -e "$1"',
      process.execPath,
      script,
      `tree/${there}`,
    ],
    { cwd: around, encoding: 'utf8' },
  );
  t.equal(said, `something is mounted at ${there}: it stays as it is\n`);
  t.strictSame(readdirSync(kept), ['file']);
  t.strictSame(readdirSync(tree), [there]);
  t.end();
});
