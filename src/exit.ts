import { loadCLibrary } from './libc.ts';

/**
 * Ends this process at once. `process.exit` waits for libuv's threads, and so for DNS lookups: 53 s with three servers
 * that do not answer and two search domains. Rejects where no native code can be loaded.
 */
export async function exitAtOnce(code: number): Promise<void> {
  const { declare } = await loadCLibrary();
  const end = declare('void _exit(int code)');
  // Loggers flush on this event, which _exit(2) does not emit.
  process.emit('exit', code);
  end(code);
}
