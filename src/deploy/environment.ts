import { userInfo } from 'node:os';
import type { ClaimedDeployment } from '../store/queue.ts';

/** The variable that children inherit, so that every process of a command is found, even outside its process group. */
export const DEPLOYMENT_MARKER = 'DEPLOY_ID';

/** The environment of a command, whose marker is the id of its deployment. */
export type MarkedEnvironment = Record<string, string> & Record<typeof DEPLOYMENT_MARKER, string>;

/** The PATH of every command whose project does not set its own; never the service's PATH. */
export const COMMAND_PATH = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin';

/** The variables that every command gets besides its project's and its deployment's. */
export function baseEnvironment(temporaryDirectory: string) {
  return { PATH: COMMAND_PATH, HOME: homeDirectory(), LANG: 'C.UTF-8', TMPDIR: temporaryDirectory };
}

/** HOME of every command, from the password database: the service's own HOME may be another user's. */
export function homeDirectory(): string {
  try {
    return userInfo().homedir || '/';
  } catch {
    return '/'; // a user without an entry, usually in a container
  }
}

/**
 * The whole environment of a command: the base, overridden by the project's variables, and these by the deployment's.
 * Nothing comes from the service's own environment. `outputFile`: where the command may write `name=value` lines.
 */
export function commandEnvironment(
  base: ReturnType<typeof baseEnvironment>,
  deployment: ClaimedDeployment,
  outputFile: string,
): MarkedEnvironment {
  return {
    ...base,
    ...deployment.variables,
    [DEPLOYMENT_MARKER]: deployment.id,
    DEPLOY_REF: deployment.ref,
    DEPLOY_PROJECT_ID: deployment.project_id,
    DEPLOY_PROJECT_NAME: deployment.project_name,
    DEPLOY_PREVIOUS_REF: deployment.previous_ref ?? '',
    DEPLOY_OUTPUT: outputFile,
  };
}

/**
 * Why a project may not have this variable; undefined when it may. Refused are names that make the dynamic linker, a
 * shell, an interpreter, git, OpenSSL or GTK load or run something else (ld.so(8), bash(1), git(1), openssl-env(7), and
 * the manuals of Python, Perl, Ruby, Node, Java and others): a command that needs one sets it itself, where it can be
 * seen.
 */
export function variableProblem(name: string, value: string): string | undefined {
  if (!NAME_FORM.test(name))
    return 'must be named with letters a-z and A-Z, digits and _, not beginning with a digit';
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

/** What the name of a variable looks like. */
export const NAME_FORM = /^[A-Za-z_][A-Za-z0-9_]*$/;
const NAME_MAX_LENGTH = 255;

/** MAX_ARG_STRLEN without its final NUL: a longer one would make every start fail with E2BIG, execve(2). */
const VARIABLE_MAX_BYTES = 131_071;

/**
 * Without those that are often set to find a project's own libraries, such as CLASSPATH, GEM_HOME, R_LIBS and
 * JULIA_DEPOT_PATH.
 */
const LOADER_NAMES = [
  // the dynamic linker and the C library
  /^_?LD_/,
  /^_?RLD/,
  /^DYLD_/,
  /^(GCONV_PATH|GETCONF_DIR|GLIBC_TUNABLES|HOSTALIASES|LOCALDOMAIN|LOCPATH|MALLOC_.*|NIS_PATH|NLSPATH|RES_OPTIONS|RESOLV_HOST_CONF)$/,
  // shells
  /^(BASH_ENV|BASHOPTS|BASH_FUNC_.*|CDPATH|ENV|FPATH|GLOBIGNORE|IFS|KSH_ENV|PROMPT_COMMAND|PS4|SHELLOPTS|ZDOTDIR)$/,
  // interpreters
  /^(PERL5|PERLLIB|PERLIO)/,
  /^PYTHON/,
  /^RUBY(OPT|LIB|SHELL|GEMS_GEMDEPS)/,
  /^(NODE_OPTIONS|NODE_PATH|NODE_REPL_EXTERNAL_MODULE|BUN_OPTIONS)$/,
  /^(JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|JDK_JAVA_OPTIONS|JAVA_OPTIONS)$/,
  /^(LUA_INIT|LUA_PATH|LUA_CPATH)/,
  /^(PHPRC|PHP_INI_SCAN_DIR|TCLLIBPATH|AWKPATH|AWKLIBPATH|CAML_LD_LIBRARY_PATH)$/,
  /^(ERL_FLAGS|ERL_AFLAGS|ERL_ZFLAGS|ERL_LIBS|ELIXIR_ERL_OPTIONS)$/,
  /^(R_PROFILE|R_ENVIRON)(_USER)?$/,
  /^(JULIA_LOAD_PATH|GUILE_LOAD_PATH|GUILE_LOAD_COMPILED_PATH)$/,
  /^DOTNET_(STARTUP_HOOKS|ADDITIONAL_DEPS|SHARED_STORE)$/,
  /^COR(ECLR)?_(ENABLE_PROFILING|PROFILER)/,
  // programs that load others
  /^(GIT_EXEC_PATH|OPENSSL_CONF|OPENSSL_MODULES|OPENSSL_ENGINES)$/,
  /^(GTK3?_MODULES|GIO_MODULE_DIR|GIO_EXTRA_MODULES)$/,
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
