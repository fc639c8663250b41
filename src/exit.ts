import { loadCLibrary } from './libc.ts';

/**
 * Ends this process. `process.exit` waits for libuv's threads, and so for a resolver that no server answers: 53 s with
 * three servers and two search domains. Rejects where no native code can be loaded.
 */
export async function exitAtOnce(code: number): Promise<void> {
  const { declare } = await loadCLibrary();
  const end = declare('void _exit(int code)');
  // What a logger still holds is written by those who listen for this.
  process.emit('exit', code);
  end(code);
}
