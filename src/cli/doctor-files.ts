import { constants, readdirSync, type Stats, statSync } from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { isPermitted, octal } from '../paths.ts';
import { quoteForBash } from '../shell-words.ts';
import { abandonedIn } from '../store/partial-file.ts';
import { exposureProblem } from '../store/place.ts';
import { formatBytes } from './bytes.ts';
import type { Case } from './doctor-case.ts';
import { type Finding, note, orOk, problem } from './findings.ts';
import { nameOfUser } from './users.ts';

/** Whether the owner of the file `path` can use it and what belongs beside it, and nobody else can. */
export function checkPermissions({ path, service, nowMs }: Case): Finding[] {
  const place = dirname(path);
  const name = basename(path);
  const file = statSync(path);
  const directory = statSync(place);
  const inUse = filesBeside(
    path,
    ['', '-wal', '-shm', '-lock'].map((side) => name + side),
  );
  const uid = process.getuid?.();
  const findings: Finding[] = [];
  const report = (message: string, advice: string) => findings.push(problem('permissions', message, advice));

  // Those beside it get its mode when davit writes.
  if ((file.mode & 0o200) === 0)
    report(`${name} is not writable (mode ${octal(file.mode)})`, `chmod 600 ${quoteForBash(path)}`);
  for (const [one, { mode }] of [...inUse, ...filesBeside(path, earlierCopies(path, nowMs))]) {
    const found = exposureProblem(join(place, one), mode);
    if (found !== undefined) report(found.message, found.advice);
  }
  for (const [one, stats] of inUse) {
    if (stats.uid !== file.uid) {
      report(
        `${one} belongs to another user than ${name}: the service may not be able to write`,
        `chown --reference=${quoteForBash(path)} ${quoteForBash(join(place, one))}`,
      );
    }
  }
  // Root may have copied it there. A service that runs could open it.
  if (file.uid === 0 && directory.uid !== 0 && service === null) {
    report(
      `${name} belongs to another user than ${place}: a service of that user cannot open it`,
      `chown -h --reference=${quoteForBash(place)} ${inUse.map(([one]) => quoteForBash(join(place, one))).join(' ')}`,
    );
  }
  if (uid === file.uid && !isPermitted(place, constants.W_OK | constants.X_OK)) {
    report(
      `this user cannot create files in ${place} (mode ${octal(directory.mode)}), where -wal and -lock belong`,
      directory.uid === uid
        ? `chmod u+wx ${quoteForBash(place)}`
        : "move the file into a directory of this user's own, such as /var/lib/davit",
    );
  }
  if ((directory.mode & 0o022) !== 0 && (directory.mode & 0o1000) === 0) {
    report(
      `others can replace the file, as they can write to ${place} (mode ${octal(directory.mode)})`,
      `chmod go-w ${quoteForBash(place)}`,
    );
  }
  if (uid !== file.uid) {
    findings.push(
      note(
        'permissions',
        'the file belongs to another user, and commands were checked with your rights',
        // sudo takes DAVIT_DB away.
        `run it as that user: sudo -u ${nameOfUser(file.uid)} davit doctor --db ${quoteForBash(path)}`,
      ),
    );
  }
  return orOk(findings, 'permissions', 'only the owner of the file has access to it');
}

/** Those of `names` that exist in the directory of `path`. */
function filesBeside(path: string, names: readonly string[]): [name: string, stats: Stats][] {
  return names.flatMap((name): [string, Stats][] => {
    const stats = statSync(join(dirname(path), name), { throwIfNoEntry: false });
    return stats === undefined ? [] : [[name, stats]];
  });
}

/** Restores and migrations keep the file as it was, and processes that were killed leave partial files. */
function earlierCopies(path: string, nowMs: number): string[] {
  const directory = dirname(path);
  const kept = readdirSync(directory, { withFileTypes: true }).filter(({ name }) =>
    name.startsWith(`${basename(path)}.before-`),
  );
  return [...kept, ...abandonedIn(directory, nowMs)]
    .filter((entry) => entry.isFile())
    .map(({ name }) => name);
}

/** The copies of the file that may be removed. */
export function checkLeftovers({ path, nowMs }: Case): Finding[] {
  const kept = earlierCopies(path, nowMs);
  if (kept.length === 0) return [];
  const bytes = filesBeside(path, kept).reduce((sum, [, { size }]) => sum + size, 0);
  return [
    note(
      'leftovers',
      `${formatBytes(bytes)} of earlier copies are kept: ${kept.join(', ')}`,
      'remove them once nobody needs them: they hold secrets, too',
    ),
  ];
}
