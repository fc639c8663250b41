import { writeFileSync } from 'node:fs';
import { Parser, type Result } from 'tap-parser';

/*
 * Reads the output of `tap --reporter=tap`, prints the result of each test file as soon as it has ended, and writes
 * `<passed> <failed>` to the file named by the first argument.
 *
 * Counts claims: tests without subtests, and assertions outside any test. A file that crashed, or in which nothing ran,
 * counts at least one failure.
 */

interface Claims {
  passed: number;
  failed: number;
  skipped: number;
}

interface Test {
  subtests: { test: Test; end: Result }[];
  assertions: Result[];
}

const total: Claims = { passed: 0, failed: 0, skipped: 0 };
const output = process.argv[2];
if (output === undefined) throw new Error('usage: tap run --reporter=tap | node scripts/tally.ts <file>');

const run = new Parser();
observe(run, (file, end) => {
  const claims = claimsOfFile(file, end);
  add(total, claims);
  say(
    `${claims.failed === 0 ? 'ok  ' : 'FAIL'}  ${end.name}  ${inWords(claims)}  ${Math.round(end.time ?? 0)} ms`,
  );
  if (claims.failed > 0) sayFailures(file, end, []);
  if (claims.skipped > 0) saySkipped(file, []);
});
run.on('complete', () => {
  writeFileSync(output, `${total.passed} ${total.failed}\n`);
});
process.stdin.pipe(run);

/** Collects what `parser` reads; calls `ended` after each of its top-level tests. */
function observe(parser: Parser, ended: (test: Test, end: Result) => void = () => {}): Test {
  const test: Test = { subtests: [], assertions: [] };
  let open: Test | undefined;
  parser.on('child', (child: Parser) => {
    open = observe(child);
  });
  parser.on('assert', (result: Result) => {
    if (open !== undefined && result.closingTestPoint) {
      test.subtests.push({ test: open, end: result });
      ended(open, result);
      open = undefined;
    } else {
      test.assertions.push(result);
    }
  });
  return test;
}

function claimsOfFile(file: Test, end: Result): Claims {
  const claims = sumOfSubtests(file);
  for (const assertion of file.assertions) claims[verdict(assertion)] += 1;
  const nothingRan = claims.passed + claims.failed + claims.skipped === 0;
  if ((nothingRan || !end.ok) && claims.failed === 0) claims.failed = 1;
  return claims;
}

function claimsOf(test: Test, end: Result): Claims {
  const claims = sumOfSubtests(test);
  if (test.subtests.length === 0) claims[verdict(end)] += 1;
  else if (!end.ok && claims.failed === 0) claims.failed = 1;
  return claims;
}

function sumOfSubtests(test: Test): Claims {
  const claims: Claims = { passed: 0, failed: 0, skipped: 0 };
  for (const { test: subtest, end } of test.subtests) add(claims, claimsOf(subtest, end));
  return claims;
}

function verdict(result: Result): keyof Claims {
  if (result.skip !== false || result.todo !== false) return 'skipped';
  return result.ok ? 'passed' : 'failed';
}

function add(sum: Claims, claims: Claims): void {
  sum.passed += claims.passed;
  sum.failed += claims.failed;
  sum.skipped += claims.skipped;
}

function inWords({ passed, failed, skipped }: Claims): string {
  return [`${passed} passed`, failed > 0 && `${failed} failed`, skipped > 0 && `${skipped} skipped`]
    .filter((part) => part !== false)
    .join(', ');
}

/** Prints the innermost failures, each with the names of the tests around it. */
function sayFailures(test: Test, end: Result, names: string[]): void {
  const inner = test.subtests.filter((subtest) => !subtest.end.ok);
  const failed = test.assertions.filter((assertion) => verdict(assertion) === 'failed');
  for (const subtest of inner) sayFailures(subtest.test, subtest.end, [...names, subtest.end.name]);
  for (const assertion of failed) sayFailure(assertion, [...names, assertion.name]);
  if (inner.length === 0 && failed.length === 0) sayFailure(end, names.length === 0 ? [end.name] : names);
}

/** Prints what was not checked on this machine, and why. */
function saySkipped(test: Test, names: string[]): void {
  for (const { test: inner, end } of test.subtests) saySkipped(inner, [...names, end.name]);
  const results = [...test.assertions, ...test.subtests.map(({ end }) => end)];
  for (const { name, skip } of results.filter((result) => verdict(result) === 'skipped')) {
    say(`      skipped: ${[...names, name].join(' > ')}${typeof skip === 'string' ? ` (${skip})` : ''}`);
  }
}

function sayFailure(result: Result, names: string[]): void {
  say(`      ${names.join(' > ')}`);
  const diagnosis: Record<string, unknown> = result.diag ?? (result.ok ? { note: 'nothing ran' } : {});
  for (const [key, value] of Object.entries(diagnosis)) {
    // The other keys tell how tap was called, or repeat the source.
    if (!['diff', 'stack', 'exitCode', 'signal', 'note', 'error', 'tapError', 'code'].includes(key)) continue;
    const text = typeof value === 'string' ? value.trimEnd() : JSON.stringify(value);
    say(`        ${key}: ${text.replaceAll('\n', '\n          ')}`);
  }
}

function say(line: string): void {
  process.stdout.write(`${line}\n`);
}
