/**
 * Ends this process at once. `process.exit` waits for libuv's threads, and so for a resolver that no server answers:
 * 53 s with three servers and two search domains. What was written to stdout and stderr is written by then.
 */
export async function exitAtOnce(code: number): Promise<void> {
  const { default: koffi } = await import('koffi');
  koffi.load('libc.so.6').func('void _exit(int code)')(code);
}
