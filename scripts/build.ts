import { copyFile, mkdir, rm } from 'node:fs/promises';
import { basename, join } from 'node:path';
import { build, type Plugin } from 'esbuild';
import { ADDON_SOURCES, ASSET_SOURCES, THREAD_NAMES } from '../src/assets.ts';

/*
 * Makes build/bundle/: one CommonJS file for the main thread and one for each other thread, with what they
 * read, and one that begins them all in the executable. The other half of src/assets.ts. CommonJS, because it is what
 * an executable's main script must be, and what hapi and its family are; a dynamic import() stays lazy in it.
 */

const ROOT = join(import.meta.dirname, '..');
export const BUNDLE = join(ROOT, 'build/bundle');

const MAIN = 'src/main.ts';
const BOOT = 'src/boot.ts';

/** What is read as it is: from where, and under which name src/assets.ts asks for it. */
const ASSETS = [
  ...Object.entries(ASSET_SOURCES).map(([name, from]) => ({ from, name })),
  ...Object.entries(ADDON_SOURCES).map(([name, from]) => ({ from, name: `${name}.node` })),
];

if (import.meta.main) await buildBundles();

/** Fills build/bundle/ anew; the same sources give the same bytes. */
export async function buildBundles(): Promise<void> {
  await rm(BUNDLE, { recursive: true, force: true });
  await mkdir(BUNDLE, { recursive: true });
  await Promise.all([BOOT, MAIN, ...THREAD_NAMES.map((name) => `src/${name}.ts`)].map(bundle));
  await Promise.all(ASSETS.map(({ from, name }) => copyFile(join(ROOT, from), join(BUNDLE, name))));
}

async function bundle(entry: string): Promise<void> {
  const name = `${basename(entry, '.ts')}.cjs`;
  await build({
    absWorkingDir: ROOT,
    entryPoints: [entry],
    outfile: join(BUNDLE, name),
    bundle: true,
    platform: 'node',
    format: 'cjs',
    target: 'node24',
    // Only white space goes: stack traces keep the names of functions.
    minifyWhitespace: true,
    legalComments: 'none',
    define: { 'import.meta.dirname': '__dirname', 'import.meta.filename': '__filename' },
    plugins: [nativeAddons()],
    logLevel: 'warning',
  });
}

/**
 * better-sqlite3 puts `.node` behind every path it is given, and /proc/self/fd/7.node is no file; koffi looks
 * around in node_modules. The bundles load the very path that nativeAddonPath() of src/assets.ts says, once in each
 * thread.
 */
function nativeAddons(): Plugin {
  const sqlite = `
    let addon;
    exports.getBinding = (path) => {
      if (addon === undefined) {
        const loaded = { exports: {} };
        process.dlopen(loaded, path);
        addon = loaded.exports;
      }
      return addon;
    };`;
  const koffi = `
    import { nativeAddonPath } from './src/assets.ts';
    const loaded = { exports: {} };
    process.dlopen(loaded, nativeAddonPath('koffi'));
    export default loaded.exports;`;
  return {
    name: 'native-addons',
    setup(bundling) {
      bundling.onLoad({ filter: /\/better-sqlite3\/lib\/binding\.js$/ }, () => ({
        loader: 'js',
        contents: sqlite,
      }));
      bundling.onLoad({ filter: /\/koffi\/index\.c?js$/ }, () => ({
        loader: 'js',
        contents: koffi,
        resolveDir: ROOT,
      }));
    },
  };
}
