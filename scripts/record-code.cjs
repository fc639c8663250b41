const { renameSync, writeFileSync } = require('node:fs');
const { join } = require('node:path');
const { setFlagsFromString } = require('node:v8');
const vm = require('node:vm');

/*
 * Loaded by a davit that scripts/package.ts runs, in each of its threads: writes down what code V8 has made of the
 * thread's bundle once davit has started.
 */

/** davit has started by then, and given nothing back yet: see src/memory.ts. */
const AFTER_MS = 1_000;

vm.Script = class extends vm.Script {
  constructor(source, options) {
    super(source, options);
    const path = join(process.env.CODE_DIRECTORY, `${options.filename}.code`);
    setTimeout(() => {
      // V8 refuses code that was made with other flags than the start's, and by now src/memory.ts has changed this one.
      setFlagsFromString('--allocation-site-pretenuring');
      writeFileSync(`${path}.new`, this.createCachedData());
      renameSync(`${path}.new`, path);
    }, AFTER_MS).unref();
  }
};
