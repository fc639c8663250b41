import { chmodSync, mkdirSync, readdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import type { Backlog } from '../../src/store/backlog.ts';
import type { ProjectDetails } from '../../src/store/projects.ts';
import { openStore } from '../../src/store/store.ts';
import { type Place, place, runProcess } from '../helpers/cli.ts';
import { newDeployment } from '../helpers/store.ts';

const create = (name: string, ...rest: string[]) => ['admin', 'project', 'create', '--name', name, ...rest];
const set = (...words: string[]) => ['admin', 'project', 'set', 'website', ...words];

t.test('a new project prints only its id on stdout', async (t) => {
  const { davit, dump } = place(t);
  await davit(create('api'));
  const { stdout, stderr, exitCode } = await davit(create('website', '--', 'true', 'now'));
  t.equal(exitCode, 0);
  t.match(stdout, /^prj_\w{24}\n$/);
  t.equal(stderr, `created project website (${stdout.trim()})\n`);
  t.match(dump()['projects'], [{ name: 'api' }, { id: stdout.trim(), name: 'website', status: 'active' }]);
});

t.test('creating the database file is reported, as a forgotten --db would create another', async (t) => {
  const { davit, dbPath } = place(t);
  const { stdout, stderr } = await davit(create('website'));
  t.equal(stderr, `created the file ${dbPath}\ncreated project website (${stdout.trim()})\n`);
});

t.test('a new project has the given settings, and defaults for the rest', async (t) => {
  const { json, directory } = place(t);
  const [bare, full] = await Promise.all([
    json<ProjectDetails>(create('bare')),
    json<ProjectDetails>(
      create(
        'full',
        '--dir',
        'site',
        '--timeout',
        'off',
        '--idle-timeout',
        '5m',
        '--report-timeout',
        '2h',
        '--policy',
        'latest',
      ),
    ),
  ]);
  t.match(bare, {
    command: null,
    directory: null,
    timeout_ms: 1_800_000,
    idle_timeout_ms: null,
    report_timeout_ms: null,
    policy: 'queue',
  });
  t.strictSame(bare.variable_names, []);
  t.match(full, {
    directory: join(directory, 'site'),
    timeout_ms: null,
    idle_timeout_ms: 300_000,
    report_timeout_ms: 7_200_000,
    policy: 'latest',
  });
});

t.test('the command is every word after --, unchanged', async (t) => {
  const { davit, dump } = place(t);
  const words = ['/bin/sh', '-c', 'echo "$1" --db', '--db', '--json', '', '--', '-h', 'ü\n'];
  const { stdout, exitCode } = await davit(create('website', '--', ...words));
  t.equal(exitCode, 0);
  t.match(dump()['projects'], [{ command: JSON.stringify(words) }]);
  await davit(['admin', 'project', 'set', stdout.trim(), '--', '/bin/true', '--version']);
  t.match(dump()['projects'], [{ command: '["/bin/true","--version"]' }]);
});

t.test('values of variables are stored and never shown', async (t) => {
  const { davit, dump, directory } = place(t);
  writeFileSync(join(directory, 'site.env'), '# secrets\nTOKEN="from file"\nSTAGE=test\nEMPTY=\n');
  const made = await davit(
    create(
      'website',
      '--env-from',
      'site.env',
      '--env',
      'STAGE=live=really',
      '--env',
      'CI_TOKEN',
      '--',
      '/bin/true',
    ),
    { env: { CI_TOKEN: 'from here' } },
  );
  t.equal(made.exitCode, 0);
  const changed = await davit(set('--env-from', '-', '--unset-env', 'EMPTY'), { stdin: 'PIPED=from stdin' });
  t.equal(changed.exitCode, 0);
  t.strictSame(variablesIn(dump()), {
    CI_TOKEN: 'from here',
    PIPED: 'from stdin',
    STAGE: 'live=really',
    TOKEN: 'from file',
  });
  const shown = await Promise.all([
    davit(['admin', 'project', 'show', 'website']),
    davit(['admin', 'project', 'show', 'website', '--json']),
    davit(['admin', 'project', 'list', '--json']),
  ]);
  for (const { stdout, stderr } of [made, changed, ...shown]) t.notMatch(stdout + stderr, /from |really/);
  t.match(shown[0].stdout, /^variables +CI_TOKEN PIPED STAGE TOKEN$/m);
});

t.test('--env takes also a variable that davit itself sets or forgets', async (t) => {
  const { davit, refused, dump } = place(t);
  const env = { UV_THREADPOOL_SIZE: '7', DAVIT_STAGE: '', NODE_TLS_REJECT_UNAUTHORIZED: '0' };
  const words = Object.keys(env).flatMap((name) => ['--env', name]);
  t.match(await davit(create('website', ...words), { env }), { exitCode: 0 });
  t.strictSame(variablesIn(dump()), env);
  t.match(await refused(set('--env', 'UV_THREADPOOL_SIZE'), { env: {} }), {
    exitCode: 1,
    message: /--env UV_THREADPOOL_SIZE: no such variable is set here/,
  });
});

t.test('variables that are stored are shown also without a command', async (t) => {
  const there = place(t);
  await there.davit(create('website', '--env', 'TOKEN=abc', '--', '/bin/true'));
  const show = async () => (await there.davit(['admin', 'project', 'show', 'website'])).stdout;
  await there.davit(set('--no-command'));
  t.match(await show(), /^command +none.*\nvariables +TOKEN$/m);
  await there.davit(set('--unset-env', 'TOKEN'));
  t.notMatch(await show(), /variables/);
});

t.test('--env-file is --env-from, and sets nothing for davit itself', async (t) => {
  const { davit, dump, directory } = place(t, runProcess);
  writeFileSync(join(directory, 'site.env'), "TOKEN=a # b\nDAVIT_DB=other.db\nDAVIT_TIMEOUT='5s'\n");
  const words = ['admin', 'project', 'create', '--name', 'website'];
  const made = await davit([...words, '--env-file', 'site.env', '--env', 'TOKEN', '--', 'x', '--env-file'], {
    env: { TOKEN: 'from here' },
  });
  t.match(made, { exitCode: 0 });
  t.match(await davit(set('--env-file=site.env', '--env', 'OWN=1')), { exitCode: 0 });
  t.strictSame(readdirSync(directory).sort(), ['davit.db', 'site.env']);
  t.match(dump()['projects'], [{ command: '["x","--env-file"]', timeout_ms: 30 * 60_000 }]);
  t.strictSame(variablesIn(dump()), { DAVIT_DB: 'other.db', DAVIT_TIMEOUT: '5s', OWN: '1', TOKEN: 'a # b' });
  const { exitCode, stderr } = await davit(['admin', 'project', 'list', '--env-file', 'site.env']);
  t.match({ exitCode, stderr }, { exitCode: 2, stderr: /unknown option '--env-file'/ });
  t.match(await davit(set('--env-file', 'missing.env')), { exitCode: 9, stderr: /missing\.env: not found/ });
});

t.test('a value in an --env-from file is all after the =, without enclosing quotes', async (t) => {
  const { davit, dump } = place(t);
  const values: [line: string, value: string][] = [
    ['abc#def', 'abc#def'],
    ['  spaced\t ', '  spaced\t '],
    ['a=b==', 'a=b=='],
    ['"a\\nb $HOME \\""', 'a\\nb $HOME \\"'],
    ["'it's'", "it's"],
    ['""', ''],
    [' "x"', ' "x"'],
    ['`date`', '`date`'],
    ["'\"mixed'", '"mixed'],
    ['\u2028\u00e9\ufeff', '\u2028\u00e9\ufeff'],
    ['a\rb', 'a\rb'],
    ['', ''],
  ];
  const lines = values.map(([line], index) => `V${index}=${line}`);
  const text = ['# of 2026', ' \t', '', '  # export X=1', ...lines, 'V0=again', 'V0=abc#def'].join('\r\n');
  t.match(await davit(create('website', '--env-from', '-'), { stdin: text }), { exitCode: 0 });
  t.strictSame(
    variablesIn(dump()),
    Object.fromEntries(values.map(([, value], index) => [`V${index}`, value])),
  );

  await davit(create('other', '--env-from', '-'), { stdin: '\ufeffFIRST=\ufeffx\nexporter=y\n' });
  t.match(variablesIn(dump()), { FIRST: '\ufeffx', exporter: 'y' }, 'a byte order mark is skipped');
});

t.test('an invalid line of an --env-from file is refused by its number and not shown', async (t) => {
  const { refused, davit } = place(t);
  await davit(create('website', '--env', 'A=1'));
  const cases: [line: string | Buffer, message: RegExp][] = [
    ['export B=secret', /--env-from -: line 3 begins with export: leave that word out/],
    [' \texport B=secret', /line 3 begins with export/],
    ['secret', /line 3 has no =: write name=value; a name alone is only for --env/],
    ['=secret', /line 3: the variable must be named with letters/],
    [' B=secret', /line 3: the variable must be named with letters/],
    ['B =secret', /line 3: the variable must be named with letters/],
    ['secret/+=', /line 3: the variable must be named with letters/],
    ['LD_PRELOAD=/secret.so', /line 3: the variable changes how programs are loaded/],
    ['B=secret\0', /line 3: the variable must not hold a NUL/],
    [Buffer.from('B=secret\xff', 'latin1'), /line 3 is not valid UTF-8/],
    ['B="-----BEGIN secret', /line 3 has a quote that is not closed on that line: .* by --env NAME/],
    ['B="secret" # no comment', /line 3 has a quote that is not closed on that line/],
    ["B='", /line 3 has a quote that is not closed on that line/],
  ];
  for (const [line, message] of cases) {
    const stdin = Buffer.concat([Buffer.from('# one\nA=2\n'), Buffer.from(line), Buffer.from('\nC=3\n')]);
    const refusal = await refused(set('--env-from', '-'), { stdin });
    t.match(refusal, { exitCode: 1, message });
    t.notMatch(refusal.message, /secret/);
  }
});

t.test('invalid project options are refused and change nothing', async (t) => {
  const { refused, davit, directory } = place(t);
  await davit(create('website', '--dir', '.', '--env', 'A=1', '--', './deploy.sh'));
  writeFileSync(join(directory, 'empty.env'), '# nothing\n');
  const cases: [words: string[], exitCode: number, message: RegExp][] = [
    [create('x', '--env', 'A=1', 'B=secret'), 2, /'B=' is not expected here: put -- before the command/],
    [
      create('x', '--env', 'A=1', 'B=secret', '--', 'make'),
      2,
      /'B=' is not expected here: leave it out, or give/,
    ],
    [create('x', 'make', 'it'), 2, /'make' is not expected here/],
    [create('x', '--'), 2, /nothing comes after --/],
    [create('x', '--', ''), 2, /the command must not be empty/],
    [create('x', '--', './deploy.sh'), 2, /'\.\/deploy\.sh' is relative to --dir: give that too/],
    [create('x', '--dir', ''), 2, /--dir must not be empty/],
    [create('x', '--timeout', '30'), 2, /--timeout <duration>.*such as 10s/],
    [create('x', '--timeout', '0'), 2, /--timeout/],
    [create('x', '--policy', 'lifo'), 2, /It must be queue or latest/],
    [create('prj_x'), 2, /the name must not look like an id/],
    [
      create('x', '--env', 'LD_PRELOAD=/evil.so'),
      2,
      /the variable LD_PRELOAD changes how programs are loaded/,
    ],
    [create('x', '--env', 'DEPLOY_REF=main'), 2, /DEPLOY_REF is reserved for davit/],
    [create('x', '--env', '1A=secret'), 2, /must be named with letters/],
    [create('x', '--env', 'a b'), 2, /must be named with letters/],
    [create('x', '--env', 'a b=secret'), 2, /must be named with letters/],
    [create('x', '--env', '=secret'), 2, /--env needs a name before the =/],
    [create('x', '--env', ''), 2, /--env needs a name before the =/],
    ...['NOT_SET_HERE', '__proto__', 'constructor', 'toString'].map((name): [string[], number, RegExp] => [
      create('x', '--env', name),
      1,
      new RegExp(`--env ${name}: no such variable is set here`),
    ]),
    [
      create('x', '--env-from', 'none.env'),
      1,
      /--env-from: none\.env cannot be read \(ENOENT\): check that it is there/,
    ],
    [
      create('x', '--env-from', '/dev/zero'),
      1,
      /--env-from: \/dev\/zero holds more than 16 MiB: check that it is the right file/,
    ],
    [create('x', '--env-from', 'empty.env'), 1, /empty\.env holds no name=value lines/],
    [set(), 2, /nothing to change/],
    [['admin', 'project', 'set', '--', 'false'], 2, /missing required argument 'project'/],
    [set('--no-command', '--', 'make'), 2, /--no-command and a command exclude each other/],
    [set('--no-dir'), 2, /'\.\/deploy\.sh' is relative to --dir/],
    [set('--env', 'A=2', '--unset-env', 'A'), 2, /A is both set and removed/],
    [set('--timeout', '1h', '--unset-env', 'B'), 1, /has no variable B/],
    [
      ['admin', 'project', 'set', 'webiste', '--timeout', '1h'],
      1,
      /there is no project 'webiste': did you mean 'website'\?/,
    ],
    [
      ['admin', 'project', 'pause', 'nothing-like-it'],
      1,
      /there is no project 'nothing-like-it': 'davit admin project list' shows all/,
    ],
  ];
  await Promise.all(
    cases.map(async ([words, exitCode, message]) => {
      const refusal = await refused(words);
      t.match(refusal, { exitCode, message }, words.join(' '));
      t.notMatch(refusal.message, /secret|evil/);
    }),
  );
});

t.test('set changes only what is given', async (t) => {
  const { davit, json, directory } = place(t);
  writeFileSync(join(directory, 'more.env'), 'C=3\n');
  const before = await json<ProjectDetails>(
    create('website', '--dir', directory, '--env', 'A=1', '--idle-timeout', '1m'),
  );
  const steps: [words: string[], changes: Partial<ProjectDetails>][] = [
    [['--timeout', 'off'], { timeout_ms: null }],
    [['--idle-timeout', '90s', '--policy', 'latest'], { idle_timeout_ms: 90_000, policy: 'latest' }],
    [['--report-timeout', '2h'], { report_timeout_ms: 7_200_000 }],
    [['--env', 'B=2', '--unset-env', 'A'], { variable_names: ['B'] }],
    [['--env-from', 'more.env'], { variable_names: ['B', 'C'] }],
    [['--dir', 'site'], { directory: join(directory, 'site') }],
    [['--dir', 'other', '--no-dir', '--name', 'website'], { directory: null }],
  ];
  let expected = before;
  for (const [words, changes] of steps) {
    expected = { ...expected, ...changes };
    t.strictSame(await json<ProjectDetails>(set(...words)), expected, words.join(' '));
  }
  await davit(set('--no-dir', '--', 'make', '--dir', 'site'));
  const shown = await json<ProjectDetails>(['admin', 'project', 'show', 'website']);
  t.strictSame(shown, { ...expected, command: ['make', '--dir', 'site'] }, "the command's own option");
  t.strictSame(await json<ProjectDetails>(set('--no-command')), expected);

  const tried = new Set([...steps.flatMap(([words]) => words), '--no-command', '--json', '--db']);
  const { stdout: help } = await davit(set('--help'));
  const options = [...help.matchAll(/^ {2}(--[\w-]+)/gm)].map(([, name = '']) => name);
  t.ok(options.length > 10);
  t.strictSame(
    options.filter((name) => !tried.has(name)),
    [],
    'options that no step tries',
  );
});

t.test('DAVIT_ variables change a project like options, and options win over them', async (t) => {
  const { davit, directory } = place(t);
  await davit(create('website', '--dir', '/', '--', 'make'));
  const steps: [words: string[], env: Record<string, string>, changes: object][] = [
    [[], { DAVIT_DIR: 'one' }, { directory: join(directory, 'one') }],
    [[], { DAVIT_DIR: 'two', DAVIT_NO_DIR: '0' }, { directory: join(directory, 'two') }],
    [['--timeout', '1h'], { DAVIT_NO_DIR: '0' }, { directory: join(directory, 'two') }],
    [['--dir', 'three'], { DAVIT_DIR: 'two', DAVIT_NO_DIR: '1' }, { directory: join(directory, 'three') }],
    [['--no-dir'], { DAVIT_DIR: 'two' }, { directory: null }],
    [['--', 'false'], { DAVIT_NO_COMMAND: '1' }, { command: ['false'] }],
    [[], { DAVIT_NO_COMMAND: '1' }, { command: null }],
  ];
  for (const [words, env, changes] of steps) {
    const { stdout, stderr } = await davit(set('--json', ...words), { env });
    t.match(JSON.parse(stdout || '{}'), changes, stderr);
  }
});

t.test('the help of create, not that of set, says what a project without a command is', async (t) => {
  const { davit } = place(t);
  const helpOf = async (name: string) =>
    (await davit(['admin', 'project', name, '--help'])).stdout.replaceAll(/\s+/g, ' ');
  t.match(await helpOf('create'), /Without a command, another system does the work/);
  t.notMatch(await helpOf('set'), /Without/);
});

t.test('create and set warn of missing files and of duplicate names', async (t) => {
  const { davit, directory } = place(t);
  mkdirSync(join(directory, 'site'));
  const script = join(directory, 'site/deploy.sh');
  t.match(await davit(create('website', '--dir', 'missing', '--', './x')), {
    stderr: /warning: the directory .*\/missing does not exist: deployments fail until that is fixed\n/,
    exitCode: 0,
  });
  t.notMatch(
    await davit(create('reported', '--dir', 'missing')),
    { stderr: /warning/ },
    'nothing is run there',
  );
  symlinkSync('circle', join(directory, 'circle'));
  for (const dir of ['circle', 'x'.repeat(256)]) {
    t.match(await davit(create(dir.slice(0, 9), '--dir', dir, '--', './x')), {
      stdout: /^prj_\w+\n$/,
      stderr: new RegExp(`warning: .*/${dir} .*: deployments fail until`),
      exitCode: 0,
    });
  }
  writeFileSync(script, '#!/bin/sh\n', { mode: 0o644 });
  t.match(await davit(create('website', '--dir', 'site', '--', './deploy.sh')), {
    stderr: /warning: .*\/site\/deploy\.sh is not executable.*warning: 2 projects have this name now/s,
    exitCode: 0,
  });
  t.match(await davit(['admin', 'project', 'set', 'circle', '--name', 'website']), {
    stderr: /warning: 3 projects have this name now: use their ids/,
  });
  t.match(await davit(create('bare', '--dir', 'site', '--', 'deploy.sh')), {
    stderr:
      /warning: the command deploy\.sh was not found in PATH \(.*\): deployments fail until that is fixed\n/,
    exitCode: 0,
  });
  t.match(await davit(['admin', 'project', 'set', 'bare', '--env', `PATH=${directory}`, '--', 'none']), {
    stderr: /warning: the command none was not found in PATH \(the project's own\)/,
    exitCode: 0,
  });
  chmodSync(script, 0o755);
  for (const why of ['nothing is wrong', 'the name means this one, as the other is archived']) {
    t.match(
      await davit(create('third', '--dir', 'site', '--', './deploy.sh')),
      { stderr: /^created project third \(\w+\)\n$/ },
      why,
    );
    await davit(['admin', 'project', 'archive', 'third']);
  }
});

t.test('a project can be paused, resumed and archived; archiving cancels what is queued', async (t) => {
  const there = place(t);
  await there.davit(create('website', '--', '/bin/true'));
  const say = async (...words: string[]) =>
    (await there.davit(['admin', 'project', ...words, 'website'])).stdout;
  t.match(await say('pause'), /^project website \(prj_\w+\) is paused\n$/);
  t.match(await say('pause'), /is already paused/);
  t.match(await say('resume'), /is active/);
  await queue(there, 'website', 2);
  t.match(await there.davit(['admin', 'project', 'list']), { stdout: /WAITING.*\n.* active +2 / });
  t.match(await there.refused(set('--no-command')), {
    exitCode: 1,
    message: /wait \(2\) need its command: cancel them/,
  });
  t.match(await there.refused(['admin', 'project', 'archive', 'website']), {
    exitCode: 2,
    message: /^error: this must be confirmed, .*: give --yes/,
  });
  t.match(await say('archive', '--yes'), /is archived; canceled 2 waiting deployments\n$/);
  t.match(await say('archive'), /is already archived\n$/);
  t.match(await there.refused(['admin', 'project', 'pause', 'website']), {
    exitCode: 1,
    message: /resume it first/,
  });
  t.match(there.dump()['deployments'], [
    { status: 'canceled', reason: 'user' },
    { status: 'canceled', reason: 'user' },
  ]);
  t.match(await there.json<ProjectDetails>(['admin', 'project', 'resume', 'website']), {
    status: 'active',
    queued_count: 0,
  });
});

t.test('an archived project is resumed by its id where an active one has its name', async (t) => {
  const there = place(t);
  const { davit, json, refused } = there;
  await davit(create('website'));
  const { id } = await json<ProjectDetails>(['admin', 'project', 'archive', 'website']);
  await davit(create('website'));
  t.match(await davit(['admin', 'project', 'resume', 'website']), {
    stdout: /is already active\n$/,
    stderr: '',
    exitCode: 0,
  });
  t.match(await davit(['admin', 'project', 'resume', id]), {
    stdout: `project website (${id}) is active\n`,
    stderr: 'warning: 2 projects have this name now: use their ids\n',
  });
  t.match(await davit(['admin', 'project', 'resume', id]), { stdout: /is already active\n$/, stderr: '' });
  t.match(await refused(['admin', 'project', 'resume', 'website']), {
    message: /several projects are named/,
  });
});

t.test('a new report timeout holds for open deployments, and set says for how many', async (t) => {
  const there = place(t);
  await there.davit(create('website', '--report-timeout', '2h'));
  t.match(await there.davit(set('--report-timeout', '3h')), { stdout: /is changed\n$/ });
  await queue(there, 'website', 2);
  const due = async () =>
    (await there.json<Backlog>(['admin', 'queue'])).reported.items.map(({ created_at, report_due_at }) =>
      report_due_at === null ? null : Date.parse(report_due_at) - Date.parse(created_at),
    );
  t.strictSame(await due(), [10_800_000, 10_800_000]);
  t.match(await there.davit(set('--report-timeout', '4h')), {
    stdout: /is changed; its report timeout also holds for 2 open deployments\n$/,
  });
  t.strictSame(await due(), [14_400_000, 14_400_000]);
  t.match(await there.davit(set('--name', 'website')), { stdout: /is changed\n$/ });
  await there.davit(set('--report-timeout', 'off'));
  t.strictSame(await due(), [null, null]);
});

t.test('set and archive say how many deployments of another system stay open', async (t) => {
  const there = place(t);
  await there.davit(create('website'));
  const archive = ['admin', 'project', 'archive', 'website'];
  t.equal((await there.davit(set('--', '/bin/true'))).stderr, '');
  await there.davit(set('--no-command'));
  await queue(there, 'website', 2);
  const note =
    /^note: 2 deployments of another system stay open: .* ends one that waits, .*set --report-timeout' limits the others\n$/;
  t.match(await there.davit(set('--', '/bin/true')), { stdout: /is changed\n$/, stderr: note });
  t.equal((await there.davit(set('--name', 'website'))).stderr, '');
  t.match(await there.davit(archive), { stdout: /is archived\n$/, stderr: note });
  t.match(await there.davit([...archive, '--json']), { stdout: /^\{/, stderr: note });
});

t.test('create says which settings have no effect', async (t) => {
  const there = place(t);
  const notes = async (...words: string[]) =>
    (await there.davit(create('website', ...words))).stderr.match(/^note: .*effect.*$/gm);
  t.strictSame(
    await notes(
      '--timeout',
      '5m',
      '--idle-timeout',
      '1m',
      '--policy',
      'latest',
      '--dir',
      '.',
      '--env',
      'A=1',
    ),
    [
      'note: without effect while the project has no command: --dir, --env, --timeout, --idle-timeout, --policy',
    ],
  );
  t.equal(await notes('--report-timeout', '2h', '--timeout', 'off'), null);
  t.equal(await notes('--timeout', '5m', '--policy', 'latest', '--', '/bin/true'), null);
  t.strictSame(await notes('--report-timeout', '2h', '--', '/bin/true'), [
    'note: without effect while the project has a command: --report-timeout',
  ]);
});

t.test('set says which settings have no effect at present', async (t) => {
  const there = place(t);
  await there.davit(create('website'));
  const said = async (...words: string[]) => (await there.davit(set(...words))).stderr;
  t.equal(
    await said('--timeout', '1h', '--policy', 'latest', '--env', 'A=1'),
    'note: without effect while the project has no command: --env, --timeout, --policy\n',
  );
  t.equal(await said('--report-timeout', '2h', '--timeout', 'off'), '');
  t.equal(await said('--timeout', '1h', '--', '/bin/true'), '');
  t.equal(
    await said('--report-timeout', '1h'),
    'note: without effect while the project has a command: --report-timeout\n',
  );
  t.equal(await said('--report-timeout', 'off'), '');
  await there.davit(set('--no-command'));
  await queue(there, 'website', 1);
  await there.davit(set('--', '/bin/true'));
  t.equal(await said('--report-timeout', '1h'), '', 'it holds for the open deployment');
});

t.test('the list of projects is printed as a table and as JSON', async (t) => {
  const { davit, json } = place(t);
  const first = (await davit(create('website', '--', 'make', "it's", 'a b'))).stdout.trim();
  t.match(await davit(['admin', 'project', 'archive', 'website']), { exitCode: 0 });
  const second = (await davit(create('a\u00fc b'))).stdout.trim();
  const [list, listed] = await Promise.all([
    davit(['admin', 'project', 'list']),
    json<ProjectDetails[]>(['admin', 'project', 'list']),
  ]);
  t.strictSame(
    listed.map(({ id, name, status }) => [id, name, status]),
    [
      [first, 'website', 'archived'],
      [second, 'a\u00fc b', 'active'],
    ],
  );
  t.equal(
    list.stdout,
    [
      'ID                            NAME     STATUS    CREATED                   COMMAND',
      `${first}  website  archived  ${listed[0]?.created_at}  make 'it'\\''s' 'a b'`,
      `${second}  a\u00fc b     active    ${listed[1]?.created_at}  none`,
      '',
    ].join('\n'),
  );
});

function variablesIn(dump: Record<string, unknown[]>): Record<string, string> {
  const rows = dump['project_variables'] as { name: string; value: string }[];
  return Object.fromEntries(rows.map(({ name, value }) => [name, value]));
}

/** As the API would; the project's queue then holds `count`. */
async function queue({ dbPath }: Place, name: string, count: number): Promise<void> {
  const store = openStore(dbPath, realEffects);
  const { id } = store.reads.projects.resolve(name);
  for (let made = 0; made < count; made++) await store.writer.write('deployments.create', newDeployment(id));
  await store.close();
}
