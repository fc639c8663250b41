/** Variables of a process, which may be deleted. */
type Environment = Record<string, string | undefined>;

/**
 * Takes `--env-file` of `davit admin project create` and `set` for `--env-from`, as many know it by that name. Node takes
 * it for its own too, wherever it stands before `--`, and has loaded the file into `environment`: what was not in there
 * at the start (`initially`, as /proc/self/environ has it) is removed again. Returns the command line with `--env-from`.
 */
export function withEnvFrom(
  commandLine: readonly string[],
  environment: Environment,
  initially: () => string,
): string[] {
  const end = commandLine.indexOf('--');
  const words = commandLine.slice(0, end === -1 ? undefined : end);
  const renamed = words.map((word) => word.replace(/^--env-file(?==|$)/, '--env-from'));
  const isGiven = renamed.some((word, index) => word !== words[index]);
  const takesOne = words.some(
    (word, index) => word === 'project' && /^(?:create|set)$/.test(words[index + 1] ?? ''),
  );
  if (!isGiven || !takesOne) return [...commandLine];
  const before = new Set(
    initially()
      .split('\0')
      .map((entry) => entry.replace(/=.*$/s, '')),
  );
  for (const name of Object.keys(environment)) if (!before.has(name)) delete environment[name];
  return [...renamed, ...commandLine.slice(words.length)];
}
