import { getSystemErrorName } from 'node:util';
import type { KoffiFunc } from 'koffi';

/** The C library, for system calls that Node does not offer. */
interface CLibrary {
  declare: Declare;
  /** The name of errno after the last call, such as `EMFILE`. */
  lastError(): string;
}

/** Returns the function with this C declaration. */
export type Declare = (declaration: string) => KoffiFunc<(...values: unknown[]) => number>;

/** Rejects where no native code can be loaded. */
export async function loadCLibrary(): Promise<CLibrary> {
  const { default: koffi } = await import('koffi');
  const library = koffi.load('libc.so.6');
  return {
    declare: (declaration) => library.func(declaration),
    lastError: () => getSystemErrorName(-koffi.errno()),
  };
}
