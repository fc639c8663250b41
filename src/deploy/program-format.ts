import { closeSync, constants, openSync, readdirSync, readSync } from 'node:fs';

/*
 * What the kernel does with a file that is to be executed, execve(2), as far as its beginning tells.
 */

/** The kernel reads no more of a script's first line: BINPRM_BUF_SIZE, execve(2). */
const FIRST_LINE_MAX_BYTES = 256;
/** Linkers put the path of the loader into the first page. */
const BEGINNING_BYTES = 4_096;

/** The first bytes of a file, padded with NULs; undefined: this user may not read it. */
export function beginningOf(path: string): Buffer | undefined {
  const bytes = Buffer.alloc(BEGINNING_BYTES);
  try {
    // O_NONBLOCK: the owner of the file may have a lease on it, for which opening it would wait up to 45 s, fcntl(2), or may
    // have just put a named pipe in its place.
    const descriptor = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
    try {
      readSync(descriptor, bytes);
    } finally {
      closeSync(descriptor);
    }
  } catch {
    return undefined;
  }
  return bytes;
}

/**
 * The interpreter in the `#!` line of a script, and what follows it, which the kernel passes as one word; undefined for
 * any other file. A carriage return belongs to its word, as it does for the kernel.
 */
export function firstLineIn(beginning: Buffer): { interpreter: string; argument: string } | undefined {
  const text = beginning.toString('utf8', 0, FIRST_LINE_MAX_BYTES);
  const [, interpreter, argument = ''] =
    /^#![ \t]*([^ \t\n\0]+)(?:[ \t]+([^\n\0]*?))?[ \t]*(?:[\n\0]|$)/.exec(text) ?? [];
  return interpreter === undefined ? undefined : { interpreter, argument };
}

/** Whether the kernel refuses to execute a file that begins so. */
export function isNoProgram(beginning: Buffer): boolean {
  return firstLineIn(beginning) === undefined && !isOfThisMachine(beginning) && !hasOtherFormats();
}

/**
 * The values of e_machine, elf(5), that run here: the processor's own, and its 32-bit mode, which most kernels run too.
 */
const MACHINES: Partial<Record<NodeJS.Architecture, readonly number[]>> = { x64: [62, 3], arm64: [183, 40] };

function isOfThisMachine(beginning: Buffer): boolean {
  const machines = MACHINES[process.arch];
  return isElf(beginning) && (machines === undefined || machines.includes(beginning.readUInt16LE(18)));
}

function isElf(beginning: Buffer): boolean {
  return beginning.toString('latin1', 0, 4) === '\x7fELF';
}

/** Whether more formats are registered than those of the kernel itself, binfmt_misc. */
function hasOtherFormats(): boolean {
  try {
    return readdirSync('/proc/sys/fs/binfmt_misc').some((name) => name !== 'register' && name !== 'status');
  } catch {
    return false;
  }
}

/** Where the fields of elf(5) are, by their bits: of the file's header, and of each program header. */
const ELF_FIELDS = {
  32: { table: 28, entryBytes: 42, entries: 44, offset: 4, bytes: 16 },
  64: { table: 32, entryBytes: 54, entries: 56, offset: 8, bytes: 32 },
} as const;
const PT_INTERP = 3;

/** The dynamic loader that an ELF program needs; undefined: none, or it is not named in the beginning. */
export function loaderIn(beginning: Buffer): string | undefined {
  if (!isElf(beginning)) return undefined;
  const is64 = beginning[4] === 2;
  const fields = ELF_FIELDS[is64 ? 64 : 32];
  const sizeAt = (at: number) => (is64 ? Number(beginning.readBigUInt64LE(at)) : beginning.readUInt32LE(at));
  const table = sizeAt(fields.table);
  const entryBytes = beginning.readUInt16LE(fields.entryBytes);
  for (let index = 0; index < beginning.readUInt16LE(fields.entries); index++) {
    const at = table + index * entryBytes;
    if (at + fields.bytes + 8 > beginning.length) return undefined;
    if (beginning.readUInt32LE(at) !== PT_INTERP) continue;
    const from = sizeAt(at + fields.offset);
    const path = beginning.toString('utf8', from, from + sizeAt(at + fields.bytes));
    // To the kernel, too, it ends at the first NUL.
    return path.endsWith('\0') ? path.slice(0, path.indexOf('\0')) : undefined;
  }
  return undefined;
}
