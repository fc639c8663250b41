import { readSync } from 'node:fs';

/** What can be read from a descriptor, up to one byte more than `maxBytes`, by which a caller sees that it is longer. */
export function readBounded(descriptor: number, maxBytes: number): Buffer {
  const bytes = Buffer.alloc(maxBytes + 1);
  let length = 0;
  while (length < bytes.length) {
    const read = readSync(descriptor, bytes, length, bytes.length - length, null);
    if (read === 0) break;
    length += read;
  }
  return bytes.subarray(0, length);
}
