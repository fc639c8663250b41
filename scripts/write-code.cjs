const { existsSync, renameSync, writeFileSync } = require('node:fs');
const { join } = require('node:path');
const v8 = require('node:v8');
const vm = require('node:vm');

/*
 * scripts/record-code.ts has a davit load this in each of its threads: once davit has been used, it writes the code that
 * V8 has compiled of the thread's bundle to a file.
 */

const { CODE_DIRECTORY, USED } = process.env;
const LOOK_EVERY_MS = 50;

// V8 refuses code that was recorded under other flags than those at the start, and src/memory.ts changes some, for all
// threads at any moment.
v8.setFlagsFromString = () => undefined;
// Without such a flag there is no gc() for it either. A slow machine calls it before all threads have written their code.
vm.runInNewContext = () => () => undefined;

vm.Script = class extends vm.Script {
  constructor(source, options) {
    super(source, options);
    const path = join(CODE_DIRECTORY, `${options.filename}.code`);
    const look = setInterval(() => {
      if (!existsSync(USED)) return;
      clearInterval(look);
      writeFileSync(`${path}.new`, this.createCachedData());
      renameSync(`${path}.new`, path);
    }, LOOK_EVERY_MS).unref();
  }
};
