import { closeSync, constants, fstatSync, openSync, readSync } from 'node:fs';
import { userInfo } from 'node:os';
import { OUTPUT_NAME_MAX_LENGTH, OUTPUT_VALUE_MAX_BYTES, OUTPUTS_MAX } from '../domain.ts';
import { codeOf } from '../errors.ts';
import { HIDDEN, hiderOf } from './mask.ts';

/** The PATH of every command whose project does not set its own; never the service's PATH. */
export const COMMAND_PATH = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin';

/** The variables that every command gets besides its project's and its deployment's. */
export interface BaseEnvironment {
  PATH: string;
  HOME: string;
  LANG: string;
  TMPDIR: string;
}

/** HOME of every command, from the password database: the service's own HOME may be another user's. */
export function homeDirectory(): string {
  try {
    return userInfo().homedir || '/';
  } catch {
    return '/'; // a user without an entry, usually in a container
  }
}

interface DeploymentVariables {
  deploymentId: string;
  ref: string;
  projectId: string;
  projectName: string;
  /** The ref that succeeded last; null: none did. */
  previousRef: string | null;
  /** A file that the command may write `name=value` lines to. */
  outputFile: string;
}

/**
 * The whole environment of a command: the base, overridden by the project's variables, and these by the deployment's.
 * Nothing comes from the service's own environment.
 */
export function commandEnvironment(
  base: BaseEnvironment,
  variables: Readonly<Record<string, string>>,
  deployment: DeploymentVariables,
): Record<string, string> {
  const { PATH, HOME, LANG, TMPDIR } = base;
  return {
    PATH,
    HOME,
    LANG,
    TMPDIR,
    ...variables,
    DEPLOY_ID: deployment.deploymentId,
    DEPLOY_REF: deployment.ref,
    DEPLOY_PROJECT_ID: deployment.projectId,
    DEPLOY_PROJECT_NAME: deployment.projectName,
    DEPLOY_PREVIOUS_REF: deployment.previousRef ?? '',
    DEPLOY_OUTPUT: deployment.outputFile,
  };
}

/**
 * Why a project may not have this variable; undefined when it may. Refused are names that make the dynamic linker, a
 * shell or an interpreter load or run something else (ld.so(8), bash(1), and the manuals of Python, Perl, Ruby, Node
 * and Java): a command that needs one sets it itself, where it can be seen.
 */
export function variableProblem(name: string, value: string): string | undefined {
  if (!NAME_FORM.test(name)) return 'must be named with letters, digits and _, not beginning with a digit';
  if (name.length > NAME_MAX_LENGTH) return `must have a name of at most ${NAME_MAX_LENGTH} characters`;
  if (name.startsWith('DEPLOY_')) return 'is reserved for davit';
  if (!HARMLESS_NAMES.has(name) && LOADER_NAMES.some((form) => form.test(name))) {
    return 'changes how programs are loaded or interpreted: set it inside the command';
  }
  if (value.includes('\0')) return 'must not hold a NUL';
  if (!value.isWellFormed()) return 'must be valid Unicode';
  if (Buffer.byteLength(`${name}=${value}`) > VARIABLE_MAX_BYTES) {
    return `must be at most ${VARIABLE_MAX_BYTES} bytes with its name`;
  }
  return undefined;
}

const NAME_FORM = /^[A-Za-z_][A-Za-z0-9_]*$/;
const NAME_MAX_LENGTH = 255;

/** MAX_ARG_STRLEN without its final NUL: a longer one would make every start fail with E2BIG, execve(2). */
const VARIABLE_MAX_BYTES = 131_071;

const LOADER_NAMES = [
  // the dynamic linker and the C library
  /^_?LD_/,
  /^_?RLD/,
  /^DYLD_/,
  /^(GCONV_PATH|GETCONF_DIR|GLIBC_TUNABLES|HOSTALIASES|LOCALDOMAIN|LOCPATH|MALLOC_.*|NIS_PATH|NLSPATH|RES_OPTIONS|RESOLV_HOST_CONF)$/,
  // shells
  /^(BASH_ENV|BASHOPTS|BASH_FUNC_.*|CDPATH|ENV|GLOBIGNORE|IFS|KSH_ENV|PROMPT_COMMAND|PS4|SHELLOPTS|ZDOTDIR)$/,
  // interpreters
  /^(PERL5|PERLLIB|PERLIO)/,
  /^PYTHON/,
  /^RUBY(OPT|LIB|SHELL|GEMS_GEMDEPS)/,
  /^(NODE_OPTIONS|NODE_PATH|NODE_REPL_EXTERNAL_MODULE)$/,
  /^(JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|JDK_JAVA_OPTIONS|JAVA_OPTIONS)$/,
  /^(LUA_INIT|LUA_PATH|LUA_CPATH)/,
  /^(PHPRC|PHP_INI_SCAN_DIR|TCLLIBPATH|R_PROFILE|ERL_FLAGS|ERL_AFLAGS|ERL_ZFLAGS)$/,
];

/** Names that match LOADER_NAMES, but only change how something is printed or hashed. */
const HARMLESS_NAMES = new Set([
  'PYTHONDONTWRITEBYTECODE',
  'PYTHONFAULTHANDLER',
  'PYTHONHASHSEED',
  'PYTHONIOENCODING',
  'PYTHONUNBUFFERED',
  'PYTHONUTF8',
]);

export interface Outputs {
  outputs: Record<string, string>;
  /** What was left out and why: a dozen lines at most for the log, without values. */
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
export function parseOutputs(bytes: Buffer, secrets: readonly string[] = []): Outputs {
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
export function readOutputs(path: string, secrets: readonly string[] = []): Outputs {
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
    const bytes = Buffer.alloc(OUTPUT_FILE_MAX_BYTES + 1);
    return parseOutputs(bytes.subarray(0, readFully(descriptor, bytes)), secrets);
  } finally {
    closeSync(descriptor);
  }
}

function readFully(descriptor: number, bytes: Buffer): number {
  let length = 0;
  while (length < bytes.length) {
    const read = readSync(descriptor, bytes, length, bytes.length - length, null);
    if (read === 0) break;
    length += read;
  }
  return length;
}

function completeLines(bytes: Buffer, problems: string[]): string[] {
  const lines = bytes.toString('utf8', 0, OUTPUT_FILE_MAX_BYTES).split(/\r?\n/);
  if (bytes.length <= OUTPUT_FILE_MAX_BYTES) return lines;
  problems.push(`it is longer than ${OUTPUT_FILE_MAX_BYTES} bytes: the rest was not read`);
  // The limit may have cut the last line.
  lines.pop();
  return lines;
}

function outputProblem(
  name: string,
  value: string,
  equals: number,
  outputs: ReadonlyMap<string, string>,
): string | undefined {
  if (equals === -1) return 'is not name=value';
  if (!NAME_FORM.test(name)) return 'has a name with other characters than letters, digits and _';
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
