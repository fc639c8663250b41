import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { Worker } from 'node:worker_threads';
import t from 'tap';
import {
  assetText,
  nativeAddonPath,
  selfCommand,
  startThread,
  THREAD_NAMES,
  unpackAddon,
  version,
} from '../src/assets.ts';
import { AppError } from '../src/errors.ts';
import { temporaryDirectory } from './helpers/store.ts';

const ROOT = join(import.meta.dirname, '..');
const ADDON = join(ROOT, `node_modules/better-sqlite3/prebuilds/linux-${process.arch}.node`);

t.test('the version is that of package.json', async (t) => {
  const { version: expected } = JSON.parse(readFileSync(join(ROOT, 'package.json'), 'utf8'));
  t.equal(version, expected);
});

t.test('schema.sql can be read', async (t) => {
  t.equal(assetText('schema.sql'), readFileSync(join(ROOT, 'schema.sql'), 'utf8'));
});

t.test('every thread has its module', async (t) => {
  for (const name of THREAD_NAMES) t.ok(existsSync(join(ROOT, `src/${name}.ts`)), name);
});

t.test('a thread is started with the options of new Worker', async (t) => {
  // Its error, as it is given a directory in place of a database, shows that this module was started.
  const thread = startThread('store/checkpoint-thread', {
    workerData: { path: temporaryDirectory(t), files: [] },
  });
  const error = await new Promise((resolve) => thread.once('error', resolve));
  t.match(error, { message: /cannot open|unable to open/ });
});

t.test(
  'run from its sources, davit starts itself with this Node, and better-sqlite3 finds its own addon',
  async (t) => {
    t.strictSame(selfCommand(), { file: process.execPath, arguments: [join(ROOT, 'src/main.ts')] });
    t.equal(nativeAddonPath('better_sqlite3'), undefined);
  },
);

t.test('an unpacked addon', async (t) => {
  t.test('loads, also in another thread, and has no name in any directory', async (t) => {
    const directory = temporaryDirectory(t);
    const path = unpackAddon('better_sqlite3', readFileSync(ADDON), [directory]);
    t.strictSame(readdirSync(directory), []);
    t.match(loadAddon(path), { Database: Function });
    const thread = new Worker(
      `const loaded = { exports: {} };
       process.dlopen(loaded, require('node:worker_threads').workerData);
       require('node:worker_threads').parentPort.postMessage(typeof loaded.exports.Database);`,
      { eval: true, workerData: path },
    );
    t.equal(await new Promise((resolve) => thread.once('message', resolve)), 'function');
    t.equal(timesMapped(), 1, 'two copies of SQLite in one process would break each other’s locks');
  });

  t.test('goes to the next directory when one does not take it', async (t) => {
    const directory = temporaryDirectory(t);
    const path = unpackAddon('better_sqlite3', readFileSync(ADDON), [
      join(directory, 'missing'),
      '/proc',
      directory,
    ]);
    t.match(path, /^\/proc\/self\/fd\/\d+$/);
    t.strictSame(readdirSync(directory), []);
  });

  t.test('fails with one line that says what to do if no directory takes it', async (t) => {
    const directory = temporaryDirectory(t);
    const missing = join(directory, 'missing');
    const open = openDescriptors();
    t.throws(() => unpackAddon('better_sqlite3', readFileSync(ADDON), [missing, '/proc']), {
      name: AppError.name,
      code: 'unavailable',
      message: `no directory to load better_sqlite3 from (${missing} ENOENT, /proc ENOENT): set TMPDIR to one where this user may write and files may be executed`,
    });
    t.strictSame(readdirSync(directory), []);
    t.equal(openDescriptors(), open);
  });
});

function loadAddon(path: string): object {
  const loaded = { exports: {} };
  process.dlopen(loaded, path);
  return loaded.exports;
}

/** How many copies of the addon this process has mapped as code. */
function timesMapped(): number {
  const code = readFileSync('/proc/self/maps', 'utf8')
    .split('\n')
    .filter((line) => line.includes('better_sqlite3') && line.includes('r-xp'));
  return code.length;
}

function openDescriptors(): number {
  return readdirSync('/proc/self/fd').length;
}
