import { setTimeout as pause } from 'node:timers/promises';
import { realEffects } from '../../src/effects.ts';
import { openStore } from '../../src/store/store.ts';
import { PROJECT } from '../helpers/store.ts';

/*
 * A process that holds a file open and writes to it some hundred times a second, until its stdin ends. Prints
 * a line when it has begun, and how many projects it made in the end.
 */

const [path = ''] = process.argv.slice(2);
const store = openStore(path, realEffects);
let stopped = false;
let count = 0;
process.stdin.resume().on('end', () => {
  stopped = true;
});
while (!stopped) {
  await store.writer.write('projects.create', { ...PROJECT, name: `busy ${count}` });
  count += 1;
  await pause(2);
  if (count === 1) process.stdout.write('begun\n');
}
await store.close();
process.stdout.write(`${count}\n`);
