/**
 * Errors as Node makes them for a number of errno(3) that it has no name for: by most calls, and by `writeSync` and
 * `writeFileSync` on a descriptor. On most machines there is no quota to be used up.
 */
export function unnamedErrors(errno: number) {
  const code = `Unknown system error ${errno}`;
  return {
    made: Object.assign(new Error(`${code}: ${code}, mkdtemp '/tmp/x'`), { errno, code, syscall: 'mkdtemp' }),
    written: Object.assign(new Error('UNKNOWN: unknown error, write'), {
      errno,
      code: 'UNKNOWN',
      syscall: 'write',
    }),
  };
}
