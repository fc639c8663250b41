import { spawnSync } from 'node:child_process';
import { chmodSync, copyFileSync, mkdirSync, readdirSync, renameSync, writeFileSync } from 'node:fs';
import { delimiter, join } from 'node:path';
import Sqlite from 'better-sqlite3';
import t, { type Test } from 'tap';
import { DEPLOYMENT_STATUSES, EVENT_TYPES, QUEUE_POLICIES, SCOPES } from '../../src/domain.ts';
import { quoteForBash, unquote } from '../../src/shell-words.ts';
import { inFile } from '../helpers/administration.ts';
import { COMPILE_CACHE, MAIN, type Place, place, run } from '../helpers/cli.ts';
import { newWebhook } from '../helpers/deliveries.ts';
import { ifHas } from '../helpers/programs.ts';
import { opened, serve } from '../helpers/served.ts';
import { KEY, newDeployment, PROJECT } from '../helpers/store.ts';
import { shownBy } from '../helpers/terminal.ts';

t.test('completed commands are those that --help lists, at every level', async (t) => {
  const { completed } = completions(t);
  for (const group of ['', 'admin', 'admin key', 'admin project', 'admin deployment', 'admin webhook']) {
    const words = group.split(' ').filter((word) => word !== '');
    const { stdout } = await run([...words, '--help']);
    const [, section = ''] = /^Commands:\n((?: {2}.*\n)+)/m.exec(stdout) ?? [];
    const listed = [...section.matchAll(/^ {2}([\w-]+)/gm)].map(([, name]) => name);
    t.ok(listed.length > 1);
    t.strictSame((await completed([...words, ''])).values, listed, group);
  }
  t.strictSame((await completed(['help', 'admin', ''])).values, (await completed(['admin', ''])).values);
});

t.test('completed options are those that --help lists', async (t) => {
  const { completed } = completions(t);
  for (const path of ['serve', 'deploy', 'restore', 'admin key create', 'admin project set', 'admin queue']) {
    const words = path.split(' ');
    const { stdout } = await run([...words, '--help']);
    const listed = [...stdout.matchAll(/^ {2}(?:-\w, )?(--[\w-]+)/gm)].map(([, name]) => name);
    t.ok(listed.length > 1);
    t.strictSame((await completed([...words, '-'])).values, listed, path);
  }
});

t.test('completed values are those that the option or argument accepts', async (t) => {
  const { completed } = completions(t);
  const cases: [line: string, values: readonly string[]][] = [
    ['ad', ['admin']],
    ['admin key cre', ['create']],
    ['admin key create --scope ', SCOPES],
    ['admin key create --scope projects:read deployments:w', ['deployments:write']],
    ['admin key create --scope=webhooks:', ['--scope=webhooks:read', '--scope=webhooks:write']],
    ['admin project create --policy ', QUEUE_POLICIES],
    ['admin deployment list --status ', DEPLOYMENT_STATUSES],
    ['admin webhook deliveries whk_1 --event-type ', EVENT_TYPES],
    ['admin webhook replay whk_1 --status ex', ['exhausted']],
    ['serve --log-level ', ['debug', 'info', 'warn', 'error', 'silent']],
    ['completion ', ['bash', 'zsh', 'fish']],
    ['--db other.db adm', ['admin']],
    ['admin key create --json --all-s', ['--all-scopes']],
    ['admin nonsense ', []],
    ['admin nonsense --', []],
    ['admin project create --name ', []],
    ['admin key list --json=', []],
    ['admin key list --nonsense=', []],
    ['__', []],
    ['help __', []],
  ];
  for (const [line, values] of cases) {
    t.strictSame(await completed(line.split(' ')), { paths: 'none', values }, line);
  }
});

t.test('where a path is expected, the shell completes paths', async (t) => {
  const { completed } = completions(t);
  const cases: [line: string, paths: string][] = [
    ['--db ', 'files'],
    ['admin key list --db=', 'files'],
    ['backup ', 'files'],
    ['serve --tls-cert ', 'files'],
    ['admin project create --dir ', 'directories'],
    ['admin project create -- ', 'files'],
    ['admin project create ', 'none'],
  ];
  for (const [line, paths] of cases)
    t.strictSame(await completed(line.split(' ')), { paths, values: [] }, line);
});

t.test('names are completed from the database, ids where a name is ambiguous', async (t) => {
  const { there, completed, described } = completions(t);
  const { project, twins, webhook, deployment } = await fill(there);
  t.strictSame((await completed(['admin', 'project', 'show', ''])).values, [
    'my site',
    twins[0],
    twins[1],
    '$(touch pwned)`id`',
  ]);
  t.strictSame((await completed(['admin', 'project', 'show', 'my'])).values, ['my site']);
  t.strictSame((await completed(['admin', 'project', 'show', 'prj_'])).values.length, 4);
  t.strictSame(
    (await completed(['admin', 'deployment', 'list', '--project='])).values[0],
    '--project=my site',
  );
  t.strictSame((await completed(['admin', 'key', 'revoke', ''])).values, ['ci'], 'no revoked key');
  t.strictSame(await described(['admin', 'webhook', 'show', '']), [`${webhook}\thooks.example.com`]);
  t.strictSame(await described(['admin', 'deployment', 'show', '']), [
    `${deployment}\tmy site main: queued, number 1`,
  ]);
  t.strictSame((await completed(['deploy', ''])).values, [], 'deploy is a client without a database');
  const retried = ['deploy', project, 'main', '--idempotency-key', ''];
  t.strictSame((await completed(retried)).values, [], 'an idempotency key is not an API key');
});

t.test('completion reads the database that --db or DAVIT_DB names', async (t) => {
  const { there, completed } = completions(t);
  await fill(there);
  mkdirSync(join(there.directory, 'empty'));
  const show = ['admin', 'project', 'show', 'my'];
  t.strictSame((await completed(['--db', 'empty/none.db', ...show])).values, []);
  t.strictSame((await completed(['--db=davit.db', ...show])).values, ['my site']);
  const env = { DAVIT_DB: there.dbPath, HOME: there.directory };
  const elsewhere = { cwd: join(there.directory, 'empty'), env };
  t.equal((await run(['__complete', 'bash', ...show], elsewhere)).stdout, 'none\nmy\\ site\n');
  const typed = ['__complete', 'bash', '--db', '~/davit.db', ...show];
  t.equal((await run(typed, { ...elsewhere, env: { HOME: there.directory } })).stdout, 'none\nmy\\ site\n');
});

t.test('completion creates, changes and reports nothing, whatever the database is', async (t) => {
  const { there, completed } = completions(t);
  const names = ['admin', 'project', 'show', ''];
  t.strictSame(await completed(names), { paths: 'none', values: [] });
  t.strictSame(readdirSync(there.directory), []);
  await fill(there);
  const before = there.dump();
  t.equal((await completed(names)).values.length, 4);
  t.strictSame(there.dump(), before);
  t.strictSame(readdirSync(there.directory), ['davit.db']);
  writeFileSync(join(there.directory, 'notes.txt'), 'my notes\n'.repeat(100));
  for (const path of ['notes.txt', '.', '/dev/null', 'nowhere/x']) {
    t.strictSame(await completed(['--db', path, ...names]), { paths: 'none', values: [] }, path);
  }
  t.match(await there.davit(['__complete', 'tcsh', '']), { stdout: '', stderr: '', exitCode: 2 });
});

t.test('a file that was moved or replaced under a service is not opened by either name', async (t) => {
  const { there, completed } = completions(t);
  await fill(there);
  await opened(await serve(t, there.directory));
  const names = ['admin', 'project', 'show', ''];
  t.equal((await completed(names)).values.length, 4);
  renameSync(there.dbPath, join(there.directory, 'new.db'));
  copyFileSync(join(there.directory, 'new.db'), there.dbPath);
  const before = readdirSync(there.directory).sort();
  t.strictSame((await completed(['--db', 'new.db', ...names])).values, []);
  t.strictSame((await completed(names)).values, []);
  t.strictSame(readdirSync(there.directory).sort(), before);
});

t.test('a file that another process has locked is not waited for', async (t) => {
  const { there, completed } = completions(t);
  await fill(there);
  const locker = new Sqlite(there.dbPath);
  t.teardown(() => locker.close());
  locker.pragma('locking_mode = EXCLUSIVE');
  locker.exec('BEGIN EXCLUSIVE');
  const startedAtMs = performance.now();
  t.strictSame((await completed(['admin', 'project', 'show', ''])).values, []);
  t.ok(performance.now() - startedAtMs < 3_000, 'elsewhere it is waited for for 5 s');
});

t.test('completion never offers a secret', async (t) => {
  const { there } = completions(t);
  const { secrets } = await fill(there);
  for (const noun of ['project', 'key', 'webhook', 'deployment']) {
    for (const shell of ['bash', 'zsh']) {
      const { stdout } = await there.davit(['__complete', shell, 'admin', noun, 'show', '']);
      for (const secret of secrets) t.notOk(stdout.includes(secret));
    }
  }
});

t.test('quotes of bash are parsed, also while they are open, and added where needed', async (t) => {
  const words: [typed: string, meant: string][] = [
    ['plain', 'plain'],
    ['my\\ site', 'my site'],
    ['"my site', 'my site'],
    [`'it'\\''s`, "it's"],
    ['"a\\"b\\c$x"', 'a"b\\c$x'],
    ['"it\'s \\`id"\\ here', "it's `id here"],
    ['"a\\$b\\\\c', 'a$b\\c'],
    [`'a"b\\c`, 'a"b\\c'],
    ['$(id)', '$(id)'],
    ['', ''],
  ];
  for (const [typed, meant] of words) t.equal(unquote(typed), meant, typed);
  const names = ['my site', "it's", 'a"b', '$(id)`id`', 'back\\slash', '日本 語', '~', 'x;y&z|*?[]{}~!#()<>'];
  t.equal(quoteForBash('日本-1@%+=:,./_'), '日本-1@%+=:,./_');
  for (const quote of ['', "'", '"']) {
    const line = names.map((name) => quote + quoteForBash(name, quote) + quote).join(' ');
    const { stdout } = spawnSync('bash', ['-c', `printf '%s\\n' ${line}`], { encoding: 'utf8' });
    t.strictSame(stdout.split('\n').slice(0, -1), names, line);
  }
});

t.test('the bash script completes words cut at : and =, and executes nothing in a name', async (t) => {
  const { there, path } = completions(t);
  await fill(there);
  writeFileSync(join(there.directory, 'completion'), (await run(['completion', 'bash'])).stdout);
  const replies = (words: readonly string[]) => {
    const script = `
      source completion || exit
      COMP_WORDS=(davit "$@"); COMP_CWORD=$#; _davit
      [[ -z $COMPREPLY ]] || printf '%s\\n' "\${COMPREPLY[@]}"`;
    const { stdout, stderr } = spawnSync('bash', ['--norc', '-c', script, 'bash', ...words], {
      cwd: there.directory,
      env: { PATH: path },
      encoding: 'utf8',
    });
    t.equal(stderr, '');
    return stdout.split('\n').slice(0, -1);
  };
  t.strictSame(replies(['ad']), ['admin']);
  t.strictSame(replies(['admin', 'key', 'create', '--scope', 'projects', ':', 'r']), ['read']);
  t.strictSame(replies(['admin', 'key', 'create', '--scope', 'projects', ':']), ['read']);
  t.strictSame(replies(['serve', '--log-level', '=', 'd']), ['debug']);
  t.strictSame(replies(['serve', '--log-level=d']), ['debug'], 'where = ends a word');
  t.strictSame(replies(['admin', 'project', 'show', '$']), ['\\$\\(touch\\ pwned\\)\\`id\\`']);
  t.strictSame(replies(['admin', 'project', 'show', '$(touch pwned) ']), []);
  t.strictSame(
    readdirSync(there.directory).sort(),
    ['bin', 'completion', 'davit.db'],
    'nothing in a name was executed',
  );
});

t.test('Tab completes in an interactive bash', ifHas('script', 'bash'), async (t) => {
  const { there, path } = completions(t);
  await fill(there);
  const typed = await shownBy(t, there.directory, 'bash --norc --noprofile -i', path, [
    ["source <(davit completion bash); PS1='> '; echo rea''dy\n", /ready\s/],
    ['davit adm\tproj\tsho\tmy\t; echo "<$_>"\n', /<my site>/],
    ['davit admin key create --scope deployments:w\t', /deployments:write /],
  ]);
  t.match(typed, /prj_\w{24}|project/);
});

t.test('Tab completes in an interactive zsh', ifHas('script', 'zsh'), async (t) => {
  const { there, path } = completions(t);
  await fill(there);
  const typed = await shownBy(t, there.directory, 'zsh -f -i', path, [
    ["autoload -U compinit; compinit -u -D; source <(davit completion zsh); echo rea''dy\n", /ready\s/],
    ['davit adm\tproj\tsho\tmy\t; echo "<$_>"\n', /<my site>/],
    ['davit admin key create --scope=deployments:w\t', /deployments:write/],
    ['\u0015davit admin \t', /project +-- what is deployed, and how/],
  ]);
  t.ok(typed);
});

t.test('the fish script completes commands, values, quoted names and paths', ifHas('fish'), async (t) => {
  const { there, path } = completions(t);
  await fill(there);
  const script = 'davit completion fish | source; for line in $argv; complete -C "$line"; end';
  const begun = ['my\\ s', '"my s', "'my s", '\\$', "'$(touch", '--db="dav', '--db ~/dav', '--db=~/dav'];
  const lines = [
    ...['davit ad', 'davit admin project show my', 'davit serve --log-level=d', 'davit --db dav'],
    ...begun.map((word) => `davit admin project show ${word}`),
  ];
  const { stdout, stderr } = spawnSync('fish', ['--no-config', '-c', script, ...lines], {
    cwd: there.directory,
    // In the locale C, fish finds nothing in a directory with other letters than those of ASCII, as TMPDIR may be one.
    env: { PATH: path, HOME: there.directory, LANG: 'C.UTF-8' },
    encoding: 'utf8',
  });
  t.equal(stderr, '');
  t.match(stdout, /^admin\tadminister davit/);
  t.match(stdout, /^my site\tprj_\w+, active$/m);
  t.match(stdout, /^--log-level=debug$/m);
  t.match(stdout, /^davit\.db$/m);
  const values = stdout.split('\n').map((line) => line.split('\t')[0]);
  const [site, quoted] = ['my site', '$(touch pwned)`id`'];
  t.strictSame(
    values.slice(-9),
    [site, site, site, quoted, quoted, '--db=davit.db', '~/davit.db', '--db=~/davit.db', ''],
    'quotes, backslashes and ~',
  );
  t.notOk(readdirSync(there.directory).includes('pwned'));
});

t.test('fish asks the program itself, also where davit is an alias with sudo', ifHas('fish'), async (t) => {
  const { there, path } = completions(t);
  mkdirSync(join(there.directory, 'other'));
  writeFileSync(join(there.directory, 'other/davit'), '#!/bin/sh\necho; echo another\n', { mode: 0o755 });
  const script = `
    davit completion fish | source
    function davit; touch asked; command davit $argv; end # which is what an alias is to fish
    for line in $argv; complete -C "$line"; end`;
  const lines = ['davit serve --log-l', '~/bin/davit serve --log-l', './other/davit a'];
  const { stdout, stderr } = spawnSync('fish', ['--no-config', '-c', script, ...lines], {
    cwd: there.directory,
    env: { PATH: path, HOME: there.directory },
    encoding: 'utf8',
  });
  t.equal(stderr, '');
  t.strictSame(
    stdout.split('\n').map((line) => line.split('\t')[0]),
    ['--log-level', '--log-level', 'another', ''],
  );
  t.notOk(readdirSync(there.directory).includes('asked'));
});

t.test('completion refuses an unknown shell, and its help says how to install it', async (t) => {
  const { there } = completions(t);
  t.match(await there.refused(['completion', 'tcsh']), { exitCode: 2, message: /bash, zsh, fish/ });
  const { stdout } = await run(['completion', '--help']);
  for (const line of ['source <(davit completion bash)', 'completions/davit.fish'])
    t.ok(stdout.includes(line));
});

interface Completions {
  there: Place;
  /** With a davit in it. */
  path: string;
  /** What may stand in place of the last word, as zsh is told. */
  completed(words: readonly string[]): Promise<{ paths: string; values: string[] }>;
  /** The same lines with what they mean. */
  described(words: readonly string[]): Promise<string[]>;
}

function completions(t: Test): Completions {
  const there = place(t);
  const lines = async (words: readonly string[]) => {
    const { stdout, stderr, exitCode } = await there.davit(['__complete', 'zsh', ...words]);
    t.strictSame([stderr, exitCode], ['', 0]);
    return stdout.split('\n').slice(0, -1);
  };
  return {
    there,
    get path() {
      const bin = join(there.directory, 'bin');
      mkdirSync(bin);
      const cache = `NODE_COMPILE_CACHE='${COMPILE_CACHE.NODE_COMPILE_CACHE}'`;
      writeFileSync(join(bin, 'davit'), `#!/bin/sh\n${cache} exec '${process.execPath}' '${MAIN}' "$@"\n`);
      chmodSync(join(bin, 'davit'), 0o755);
      return [bin, '/usr/bin', '/bin'].join(delimiter);
    },
    async completed(words) {
      const [paths = '', ...candidates] = await lines(words);
      return { paths, values: candidates.map((line) => line.split('\t')[0] ?? '') };
    },
    described: async (words) => (await lines(words)).slice(1),
  };
}

/** A file with something of each noun. */
function fill(there: Place) {
  return inFile(there, async ({ writer }) => {
    const create = async (name: string) =>
      (await writer.write('projects.create', { ...PROJECT, timeoutMs: null, name })).id;
    const project = await create('my site');
    const twins = [await create('twin'), await create('twin')];
    await create('$(touch pwned)`id`');
    const { key, secret } = await writer.write('keys.create', { ...KEY, name: 'ci' });
    const old = await writer.write('keys.create', { ...KEY, name: 'old' });
    await writer.write('keys.revoke', { id: old.key.id });
    const url = 'https://hooks.example.com/services/T0123/secret-path';
    const webhook = await newWebhook({ writer }, key.id, { url });
    const deployment = await writer.write('deployments.create', newDeployment(project));
    const secrets = [secret, old.secret, webhook.signing_secret, 'secret-path'];
    return { project, twins, webhook: webhook.id, deployment: deployment.id, secrets };
  });
}
