import { execFileSync } from 'node:child_process';
import { userInfo } from 'node:os';
import t from 'tap';
import { commandEnvironment, homeDirectory, variableProblem } from '../../src/deploy/environment.ts';
import type { DeploymentId, ProjectId, Ref } from '../../src/domain.ts';
import type { ClaimedDeployment } from '../../src/store/queue.ts';

const BASE = { PATH: '/usr/bin:/bin', HOME: '/var/lib/davit', LANG: 'C.UTF-8', TMPDIR: '/tmp/run' };

const DEPLOYMENT: ClaimedDeployment = {
  id: 'dpl_1' as DeploymentId,
  ref: 'v1.2.3' as Ref,
  project_id: 'prj_1' as ProjectId,
  project_name: 'The website',
  command: ['./release.sh'],
  directory: null,
  timeout_ms: null,
  idle_timeout_ms: null,
  variables: {},
  previous_ref: null,
};

const OUTPUT_FILE = '/tmp/run/output';

const DEPLOYMENT_VARIABLES = {
  DEPLOY_ID: 'dpl_1',
  DEPLOY_REF: 'v1.2.3',
  DEPLOY_PROJECT_ID: 'prj_1',
  DEPLOY_PROJECT_NAME: 'The website',
  DEPLOY_PREVIOUS_REF: '',
  DEPLOY_OUTPUT: OUTPUT_FILE,
};

t.test('a command gets the base environment, its own variables and DEPLOY_ ones, nothing else', async (t) => {
  const variables = { TOKEN: 'abc' };
  t.strictSame(commandEnvironment(BASE, { ...DEPLOYMENT, variables }, OUTPUT_FILE), {
    ...BASE,
    ...variables,
    ...DEPLOYMENT_VARIABLES,
  });
});

t.test('a project may set base variables but not DEPLOY_ ones', async (t) => {
  const own = { PATH: '/opt/bin', HOME: '/srv', LANG: 'de_DE.UTF-8', TMPDIR: '/srv/tmp' };
  const variables = { ...own, DEPLOY_ID: 'dpl_other', DEPLOY_REF: 'other' };
  const environment = commandEnvironment(BASE, { ...DEPLOYMENT, variables }, OUTPUT_FILE);
  t.strictSame(environment, { ...own, ...DEPLOYMENT_VARIABLES });
});

t.test('HOME is that of the user, not of the environment of davit', ifHasEntry(), async (t) => {
  const before = process.env['HOME'];
  t.teardown(() => {
    if (before === undefined) delete process.env['HOME'];
    else process.env['HOME'] = before;
  });
  process.env['HOME'] = '/of/somebody/else';
  t.equal(homeDirectory(), userInfo().homedir);
});

t.test('DEPLOY_PREVIOUS_REF is the ref of the previous deployment', async (t) => {
  const deployment = { ...DEPLOYMENT, previous_ref: 'v1.2.2' as Ref };
  const environment = commandEnvironment(BASE, deployment, OUTPUT_FILE);
  t.equal(environment['DEPLOY_PREVIOUS_REF'], 'v1.2.2');
});

t.test('ordinary variables are allowed', async (t) => {
  const names = [
    'TOKEN',
    '_x',
    'a1',
    'PATH',
    'HOME',
    'LANG',
    'TMPDIR',
    'DATABASE_URL',
    'DAVIT_URL',
    'GIT_SSH_COMMAND',
  ];
  for (const name of [
    ...names,
    ...['CLASSPATH', 'GEM_HOME', 'GEM_PATH', 'BUNDLE_GEMFILE', 'R_LIBS', 'JULIA_DEPOT_PATH', 'DOTNET_ROOT'],
    'PYTHONUNBUFFERED',
    'PYTHONDONTWRITEBYTECODE',
    'PYTHONFAULTHANDLER',
    'PYTHONHASHSEED',
    'PYTHONIOENCODING',
    'PYTHONUTF8',
    'ENVIRONMENT',
    '__proto__',
    'DEPLOY',
    'A'.repeat(255),
  ]) {
    t.equal(variableProblem(name, 'value\nof two lines'), undefined, name);
  }
});

t.test('variables that change how programs are loaded are refused', async (t) => {
  const names = [
    ...[
      'LD_PRELOAD',
      'LD_LIBRARY_PATH',
      'LD_AUDIT',
      'DYLD_INSERT_LIBRARIES',
      'GCONV_PATH',
      'GLIBC_TUNABLES',
      'LOCPATH',
    ],
    ...['BASH_ENV', 'ENV', 'SHELLOPTS', 'BASHOPTS', 'IFS', 'PS4', 'PROMPT_COMMAND', 'CDPATH', 'ZDOTDIR'],
    ...['NODE_OPTIONS', 'NODE_PATH', 'PYTHONPATH', 'PYTHONHOME', 'PYTHONSTARTUP', 'PYTHONWARNINGS'],
    ...[
      'PERL5LIB',
      'PERL5OPT',
      'PERLLIB',
      'RUBYOPT',
      'RUBYLIB',
      'JAVA_TOOL_OPTIONS',
      '_JAVA_OPTIONS',
      'LUA_INIT',
    ],
    ...['_LD_PRELOAD', 'RLD_LIST', '_RLD_LIST', 'MALLOC_TRACE', 'GETCONF_DIR', 'HOSTALIASES', 'LOCALDOMAIN'],
    ...['NIS_PATH', 'NLSPATH', 'RES_OPTIONS', 'RESOLV_HOST_CONF', 'BASH_FUNC_ls', 'GLOBIGNORE', 'KSH_ENV'],
    ...['PERL5DB', 'PERLIO', 'PERLIO_DEBUG', 'RUBYSHELL', 'RUBYGEMS_GEMDEPS', 'NODE_REPL_EXTERNAL_MODULE'],
    ...['JDK_JAVA_OPTIONS', 'JAVA_OPTIONS', 'LUA_INIT_5_4', 'LUA_PATH', 'LUA_CPATH', 'LUA_CPATH_5_4'],
    ...['PHPRC', 'PHP_INI_SCAN_DIR', 'TCLLIBPATH', 'ERL_FLAGS', 'ERL_AFLAGS', 'ERL_ZFLAGS', 'ERL_LIBS'],
    ...['R_PROFILE', 'R_PROFILE_USER', 'R_ENVIRON', 'R_ENVIRON_USER', 'DOTNET_STARTUP_HOOKS'],
    ...['JULIA_LOAD_PATH', 'GUILE_LOAD_PATH', 'GUILE_LOAD_COMPILED_PATH', 'GIT_EXEC_PATH'],
    ...['OPENSSL_CONF', 'OPENSSL_MODULES', 'OPENSSL_ENGINES'],
    ...['CORECLR_ENABLE_PROFILING', 'CORECLR_PROFILER', 'CORECLR_PROFILER_PATH', 'CORECLR_PROFILER_PATH_64'],
    ...['COR_ENABLE_PROFILING', 'COR_PROFILER', 'COR_PROFILER_PATH', 'DOTNET_ADDITIONAL_DEPS'],
    ...['DOTNET_SHARED_STORE', 'BUN_OPTIONS', 'ELIXIR_ERL_OPTIONS', 'CAML_LD_LIBRARY_PATH', 'FPATH'],
    ...['AWKPATH', 'AWKLIBPATH', 'GTK_MODULES', 'GTK3_MODULES', 'GIO_MODULE_DIR', 'GIO_EXTRA_MODULES'],
  ];
  for (const name of names) {
    t.equal(
      variableProblem(name, 'x'),
      'changes how programs are loaded or interpreted: set it inside the command',
      name,
    );
  }
});

t.test('invalid and reserved variable names are refused', async (t) => {
  for (const name of ['', '1A', 'A-B', 'A B', 'A=B', 'BASH_FUNC_x%%', 'Ä', 'A\0']) {
    t.match(variableProblem(name, 'x'), 'must be named with letters', name);
  }
  t.match(variableProblem('A'.repeat(256), 'x'), 'at most 255 characters');
  for (const name of ['DEPLOY_ID', 'DEPLOY_ANYTHING']) {
    t.equal(variableProblem(name, 'x'), 'is reserved for davit');
  }
});

t.test('values that no environment can hold are refused', async (t) => {
  t.equal(variableProblem('A', 'a\0b'), 'must not hold a NUL');
  t.equal(variableProblem('A', '\ud800'), 'must be valid Unicode');
  t.equal(variableProblem('A', 'x'.repeat(131_069)), undefined);
  t.match(variableProblem('A', 'x'.repeat(131_070)), 'at most 131071 bytes');
  t.equal(variableProblem('A', 'é'.repeat(65_534)), undefined);
  t.match(variableProblem('A', 'é'.repeat(65_535)), 'at most 131071 bytes');
  // The system's own opinion about the limit.
  t.doesNotThrow(() => execFileSync('true', { env: { A: 'x'.repeat(131_069) } }));
  t.throws(() => execFileSync('true', { env: { A: 'x'.repeat(131_070) } }), { code: 'E2BIG' });
});

/** In a container a user may be a number only. */
function ifHasEntry(): { skip?: string } {
  try {
    userInfo();
    return {};
  } catch {
    return { skip: 'this user has no entry in /etc/passwd' };
  }
}
