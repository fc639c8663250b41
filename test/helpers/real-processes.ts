/*
 * Loaded into every test process (`node-arg` of tap's configuration). tap wraps what starts processes, to
 * follow coverage into them: it adds NODE_OPTIONS and more to their environment and drops variables with odd
 * names. Tests here start real processes, with exactly the environment that they are given.
 *
 * For coverage, too, tap reads each file that a test loads once more, and its source map: `test-env` excludes all
 * files from that. Types that Node strips leave every line where it was.
 */

const wrapped: unknown = Reflect.get(globalThis, Symbol.for('process-on-spawn@*:singletonId'));
if (!isWrapped(wrapped)) {
  throw new Error('tap wraps child processes in another way than it did: see test/helpers/real-processes.ts');
}
wrapped.unwrap();

function isWrapped(value: unknown): value is { unwrap(): void } {
  return (
    typeof value === 'object' && value !== null && 'unwrap' in value && typeof value.unwrap === 'function'
  );
}
