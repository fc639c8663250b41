import { getAsset, getRawAsset } from 'node:sea';
import { Script } from 'node:vm';
import { isMainThread, threadName } from 'node:worker_threads';

/*
 * What each thread of the executable begins with: runs its bundle, with the code that V8 had made of it when a davit
 * was run for that (scripts/package.ts). With what Node itself keeps of a text that never ran, davit was ready 30 ms
 * later. Where V8 refuses the code, as with other flags in NODE_OPTIONS, the text is compiled anew.
 */

const name = `${isMainThread ? 'main' : threadName}.cjs`;
const script = new Script(`(function (require, module, exports) {${getAsset(name, 'utf8')}\n})`, {
  filename: name,
  cachedData: new Uint8Array(getRawAsset(`${name}.code`)),
});
script.runInThisContext()(require, { exports: {} }, {});
