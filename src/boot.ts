import { getAsset, getRawAsset } from 'node:sea';
import { Script } from 'node:vm';
import { isMainThread, threadName } from 'node:worker_threads';

/*
 * The entry point of each thread of the executable. Runs the thread's bundle with the V8 code cache that
 * scripts/record-code.ts recorded from a davit that had been used; with Node's own, made before anything ran, davit was
 * ready 30 ms later. Where V8 rejects the cache, it compiles the source.
 */

const name = `${isMainThread ? 'main' : threadName}.cjs`;
const script = new Script(`(function (require, module, exports) {${getAsset(name, 'utf8')}\n})`, {
  filename: name,
  cachedData: new Uint8Array(getRawAsset(`${name}.code`)),
});
script.runInThisContext()(require, { exports: {} }, {});
