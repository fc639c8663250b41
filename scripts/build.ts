import { copyFile, mkdir, rm } from 'node:fs/promises';
import { basename, join } from 'node:path';
import { build, type Plugin } from 'esbuild';
import { ADDON_SOURCES, ASSET_SOURCES, THREAD_NAMES } from '../src/assets.ts';

/*
 * Makes build/bundle/: a CommonJS file for the main thread, one for each other thread, one that starts them in the
 * executable, and the assets that they read, as src/assets.ts expects them. CommonJS, because the main script of an
 * executable must be, and hapi and its packages are; a dynamic import() stays lazy in it.
 */

const ROOT = join(import.meta.dirname, '..');
export const BUNDLE = join(ROOT, 'build/bundle');

const MAIN = 'src/main.ts';
const BOOT = 'src/boot.ts';

/** Files that are copied unchanged: their sources, and the names that src/assets.ts reads them by. */
const ASSETS = [
  ...Object.entries(ASSET_SOURCES).map(([name, from]) => ({ from, name })),
  ...Object.entries(ADDON_SOURCES).map(([name, from]) => ({ from, name: `${name}.node` })),
];

if (import.meta.main) await buildBundles();

/** Fills build/bundle/; the same sources give the same bytes. */
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
    // Node has it, and what esbuild makes of it goes wrong in a loop: the error of one round is thrown in all later ones.
    supported: { using: true },
    // All but identifiers, so that stack traces keep the names of functions.
    minifyWhitespace: true,
    minifySyntax: true,
    legalComments: 'none',
    define: { 'import.meta.dirname': '__dirname', 'import.meta.filename': '__filename' },
    plugins: [nativeAddons()],
    logLevel: 'warning',
  });
}

/**
 * Makes the bundles load native addons from the path that nativeAddonPath() of src/assets.ts returns, once in each
 * thread. better-sqlite3 would append `.node` to that path, and /proc/self/fd/7.node is no file; koffi would search
 * node_modules.
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
