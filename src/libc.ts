import { getSystemErrorName } from 'node:util';
import type { KoffiFunc } from 'koffi';

/** The C library, for what the system has and Node has not. */
interface CLibrary {
  declare: Declare;
  /** The code of the system for why the last call failed, such as `EMFILE`. */
  lastError(): string;
}

/** Gives the function of this declaration in C. */
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
