import { closeSync, openSync, readdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import { readOptionFile } from '../src/option-files.ts';
import { readBounded } from '../src/read-bounded.ts';
import { temporaryDirectory } from './helpers/store.ts';

t.test('all of a file is read, or one byte more than is wanted of it', async (t) => {
  const path = join(temporaryDirectory(t), 'file');
  const bytes = Buffer.from(Array.from({ length: 300_000 }, (_, index) => index % 251));
  writeFileSync(path, bytes);
  for (const maxBytes of [0, 1, 65_535, 65_536, 299_998, 299_999, 300_000, 1_000_000]) {
    const read = readBounded(opened(t, path), maxBytes);
    t.ok(read.equals(bytes.subarray(0, maxBytes + 1)), `at most ${maxBytes}`);
  }
});

t.test('what comes in small pieces, as from a pipe, takes little more room than it has bytes', async (t) => {
  const path = '/proc/self/smaps'; // of this, one read(2) brings a page at most
  const descriptor = opened(t, path);
  const before = process.memoryUsage().arrayBuffers;
  const { length } = readBounded(descriptor, 16 * 1024 * 1024);
  const taken = process.memoryUsage().arrayBuffers - before;
  t.ok(length > 64 * 1024, `${length} bytes`);
  t.ok(taken <= 4 * length, `${taken} bytes for ${length}`);
});

t.test('the file of an option is closed once it was read, or could not be', async (t) => {
  const directory = temporaryDirectory(t);
  const path = join(directory, 'file');
  writeFileSync(path, 'text');
  const before = readdirSync('/proc/self/fd');
  t.equal(readOptionFile('--ca-file', path).toString(), 'text');
  t.throws(() => readOptionFile('--ca-file', directory), { message: /^--ca-file: .* \(EISDIR\)/ });
  t.strictSame(readdirSync('/proc/self/fd'), before);
});

function opened(t: Test, path: string): number {
  const descriptor = openSync(path, 'r');
  t.teardown(() => closeSync(descriptor));
  return descriptor;
}
