import { isUtf8 } from 'node:buffer';
import { closeSync, constants, fstatSync, openSync } from 'node:fs';
import { OUTPUT_NAME_MAX_LENGTH, OUTPUT_VALUE_MAX_BYTES, OUTPUTS_MAX } from '../domain.ts';
import { codeOf } from '../errors.ts';
import { readBounded } from '../read-bounded.ts';
import { NAME_FORM } from './environment.ts';
import { HIDDEN, hiderOf } from './mask.ts';

export interface Outputs {
  outputs: Record<string, string>;
  /** What was left out or replaced, and why: a dozen lines at most for the log, without values. */
  notes: string[];
}

/** More of DEPLOY_OUTPUT is not read. */
export const OUTPUT_FILE_MAX_BYTES = 64 * 1024;
const NOTES_MAX = 10;

/**
 * The outputs in a file of `name=value` lines: at most 100, names like those of variables and of 64 characters at most,
 * values of 4 KiB at most. If a name is repeated, the last line counts. A line that breaks a rule is left out and
 * noted. A key may be allowed to read outputs but not logs, so secrets are hidden in values as in logs. A line is left
 * out if its name is a secret, or if a secret reaches from the name into the value.
 */
export function parseOutputs(bytes: Buffer, secrets: readonly string[]): Outputs {
  const outputs = new Map<string, string>();
  const problems: string[] = [];
  const hide = hiderOf(secrets);
  for (const [index, line] of completeLines(bytes, problems).entries()) {
    if (line === '') continue;
    const equals = line.indexOf('=');
    const name = line.slice(0, Math.max(0, equals));
    const value = hide(line.slice(equals + 1));
    const isSecret = hide(name) === HIDDEN || hide(line) !== `${hide(line.slice(0, equals + 1))}${value}`;
    const problem = isSecret ? 'would show a secret as a name' : outputProblem(name, value, equals, outputs);
    if (problem === undefined) outputs.set(name, value);
    else problems.push(`line ${index + 1} ${problem}`);
  }
  return { outputs: Object.fromEntries(outputs), notes: notesOf(problems) };
}

/**
 * The same for the file at DEPLOY_OUTPUT. The command may have put anything there: what is not a regular file, links
 * included, is not read, and gives a note. A missing file gives nothing.
 */
export function readOutputs(path: string, secrets: readonly string[]): Outputs {
  try {
    return outputsIn(path, secrets);
  } catch (error) {
    const code = codeOf(error);
    return { outputs: {}, notes: code === 'ENOENT' ? [] : notesOf([`it could not be read: ${code}`]) };
  }
}

function outputsIn(path: string, secrets: readonly string[]): Outputs {
  // O_NONBLOCK: opening a named pipe would wait for its writer.
  const descriptor = openSync(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
  try {
    const stat = fstatSync(descriptor);
    if (!stat.isFile()) return { outputs: {}, notes: notesOf(['it is not a plain file']) };
    if (stat.size === 0) return { outputs: {}, notes: [] };
    return parseOutputs(readBounded(descriptor, OUTPUT_FILE_MAX_BYTES), secrets);
  } finally {
    closeSync(descriptor);
  }
}

function completeLines(bytes: Buffer, problems: string[]): string[] {
  let complete = bytes;
  if (bytes.length > OUTPUT_FILE_MAX_BYTES) {
    problems.push(`it is longer than ${OUTPUT_FILE_MAX_BYTES} bytes: the rest was not read`);
    // The limit may have cut the last line.
    complete = bytes.subarray(0, bytes.lastIndexOf('\n', OUTPUT_FILE_MAX_BYTES - 1) + 1);
  }
  if (!isUtf8(complete)) problems.push('it is not valid UTF-8: U+FFFD stands for what is not');
  return complete.toString().split(/\r?\n/);
}

function outputProblem(
  name: string,
  value: string,
  equals: number,
  outputs: ReadonlyMap<string, string>,
): string | undefined {
  if (equals === -1) return 'is not name=value';
  if (!NAME_FORM.test(name)) return 'has a name with other characters than letters a-z and A-Z, digits and _';
  // As in a report: in the JSON of the API, a client of JavaScript could take it for an object's prototype.
  if (name === '__proto__') return 'has the name __proto__, which is refused';
  if (name.length > OUTPUT_NAME_MAX_LENGTH)
    return `has a name of more than ${OUTPUT_NAME_MAX_LENGTH} characters`;
  if (value.includes('\0')) return 'holds a NUL';
  if (Buffer.byteLength(value) > OUTPUT_VALUE_MAX_BYTES) {
    return `has a value of more than ${OUTPUT_VALUE_MAX_BYTES} bytes`;
  }
  if (outputs.size >= OUTPUTS_MAX && !outputs.has(name)) return `would be more than ${OUTPUTS_MAX} outputs`;
  return undefined;
}

function notesOf(problems: string[]): string[] {
  const notes = problems.slice(0, NOTES_MAX).map((problem) => `DEPLOY_OUTPUT: ${problem}`);
  if (problems.length > NOTES_MAX) notes.push(`DEPLOY_OUTPUT: and ${problems.length - NOTES_MAX} more`);
  return notes;
}
