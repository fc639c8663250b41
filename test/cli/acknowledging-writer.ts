import { setTimeout as pause } from 'node:timers/promises';
import { realEffects } from '../../src/effects.ts';
import { openStore } from '../../src/store/store.ts';
import { PROJECT } from '../helpers/store.ts';

/*
 * A process that keeps a database open and creates projects, some hundred a second, until its stdin ends. Prints the id
 * of each once it is acknowledged: a line that was printed is a write that must never be lost.
 */

const [path = ''] = process.argv.slice(2);
const store = openStore(path, realEffects);
let stopped = false;
process.stdin.resume().on('end', () => {
  stopped = true;
});
while (!stopped) {
  const { id } = await store.writer.write('projects.create', PROJECT);
  process.stdout.write(`${id}\n`);
  await pause(1);
}
await store.close();
