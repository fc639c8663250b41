import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, readdirSync, rmSync, statSync, symlinkSync, writeFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { text } from 'node:stream/consumers';
import t from 'tap';
import { version } from '../../src/assets.ts';
import { serveOptions } from '../../src/config.ts';
import { realEffects } from '../../src/effects.ts';
import { newKeySecret, newSigningSecret } from '../../src/secrets.ts';
import { COMPILE_CACHE, MAIN, place, run, runProcess } from '../helpers/cli.ts';
import { changeFile } from '../helpers/files.ts';
import { serveWithLog } from '../helpers/served.ts';

t.test('--version prints only the version', async (t) => {
  t.strictSame(await run(['--version']), { stdout: `${version}\n`, stderr: '', exitCode: 0 });
});

t.test('--help fits 80 columns at every level, gives examples, and lists every command', async (t) => {
  const commands = new Map<string, string[]>();
  const look = async (words: string[]): Promise<void> => {
    const { stdout, stderr, exitCode } = await run([...words, '--help']);
    t.strictSame([stderr, exitCode], ['', 0]);
    t.match(stdout, /^Usage: davit/);
    t.match(stdout, /^Examples:\n {2}\$ \S/m);
    t.notMatch(stdout, /sudo -u \S+ davit (?!.*--db )/, 'sudo takes DAVIT_DB away');
    t.strictSame(
      stdout.split('\n').filter((line) => line.length > 80),
      [],
    );
    const names = commandsIn(stdout);
    if (names.length > 0) commands.set(words.join(' '), names);
    for (const name of names.filter((one) => one !== 'help')) await look([...words, name]);
  };
  await look([]);
  t.strictSame(Object.fromEntries(commands), {
    '': ['serve', 'deploy', 'verify', 'backup', 'restore', 'doctor', 'completion', 'admin', 'help'],
    admin: ['project', 'key', 'deployment', 'webhook', 'queue', 'migrate', 'systemd-unit'],
    'admin key': ['create', 'list', 'show', 'rotate', 'revoke'],
    'admin project': ['create', 'list', 'show', 'set', 'pause', 'resume', 'archive', 'check'],
    'admin deployment': ['create', 'list', 'show', 'logs', 'cancel', 'redeploy'],
    'admin webhook': ['list', 'show', 'enable', 'disable', 'delete', 'ping', 'deliveries', 'replay'],
  });
});

t.test('arguments and variables that are not UTF-8 are refused', async (t) => {
  const { directory } = place(t);
  const cases: [script: string, exitCode: number, error: RegExp][] = [
    [
      '"$@" --env "A=$(printf "p\\344ss")"',
      2,
      /^error: argument 6 is not valid UTF-8 \(see 'davit --help'\)\n$/,
    ],
    ['"$@" -- echo "$(printf "\\377")"', 2, /^error: argument 7 is not valid UTF-8 /],
    ['DAVIT_DB="$(printf "caf\\351.db")" "$@"', 2, /^error: DAVIT_DB is not valid UTF-8 \(see/],
    ['A="$(printf "p\\344ss")" "$@" --env A', 1, /^error: --env A: its value here is not valid UTF-8\n$/],
  ];
  for (const [script, exitCode, error] of cases) {
    const words = [MAIN, 'admin', 'project', 'create', '--name=x'];
    const child = spawn('/bin/sh', ['-c', script, 'sh', process.execPath, ...words], {
      cwd: directory,
      env: COMPILE_CACHE,
    });
    const [stderr, [ended]] = await Promise.all([text(child.stderr), once(child, 'close')]);
    t.equal(ended, exitCode);
    t.match(stderr, error);
  }
  t.strictSame(readdirSync(directory), [], 'nothing was made');
});

t.test('--help names the variable of every option', async (t) => {
  const helps = await Promise.all(
    [
      'serve',
      'verify',
      'admin key create',
      'admin key revoke',
      'admin project set',
      'admin deployment list',
      'admin deployment logs',
      'admin webhook ping',
      'admin webhook replay',
      'admin queue',
    ].map((path) => run([...path.split(' '), '--help'])),
  );
  for (const { stdout } of helps) {
    const options = stdout.split(/\n {2}(?=-)/).slice(1);
    t.ok(options.length > 2);
    for (const option of options.filter((help) => !help.startsWith('-h,')))
      t.match(option, /\$DAVIT_[A-Z_]+\)/);
    t.match(stdout, /^Examples:$/m);
  }
});

t.test('--help gives an example for every duration', async (t) => {
  for (const path of [
    'serve',
    'deploy',
    'admin project create',
    'admin project set',
    'admin key create',
    'admin key rotate',
  ]) {
    const { stdout } = await run([...path.split(' '), '--help']);
    const durations = stdout.split(/\n {2}(?=-)/).filter((option) => option.includes('<duration>'));
    t.ok(durations.length > 0);
    for (const option of durations) t.match(option, /\d+[dhms]\b/, path);
  }
});

t.test('wrong usage is one line that says what to do, and exit code 2', async (t) => {
  const { refused, directory } = place(t);
  const cases: [line: string, message: RegExp][] = [
    ['sevre', /unknown command 'sevre': did you mean serve\?/],
    ['admin key lst', /unknown command 'lst': did you mean list\?/],
    ['admin nonsense', /unknown command 'nonsense' \(see 'davit admin --help'\)/],
    ['project list', /unknown command 'project': did you mean davit admin project\?/],
    ['deployments', /unknown command 'deployments': did you mean davit admin deployment\?/],
    ['help keys', /unknown command 'keys': did you mean davit admin key\?/],
    ['admin help', /unknown command 'help': did you mean davit admin --help\?/],
    ['admin key help', /unknown command 'help': did you mean davit admin key --help\?/],
    ['admin backup x', /unknown command 'backup': did you mean davit backup\?/],
    ['version', /unknown command 'version': did you mean davit --version\?/],
    [
      'admin --json key list',
      /^error: option '--json' goes after the command that takes it \(see 'davit admin --help'\)$/m,
    ],
    ['--listen=:80 serve', /^error: option '--listen' goes after the command/m],
    ['-v', /unknown option '-v': did you mean -V\?/],
    ['logs dpl_1', /unknown command 'logs': did you mean davit admin deployment\?/],
    ['admin deployment rollback dpl_1', /unknown command 'rollback': did you mean davit deploy\?/],
    ['admin project unpause website', /unknown command 'unpause': did you mean resume\?/],
    ['admin project rm website', /did you mean archive\?/],
    ['admin project rename website shop', /unknown command 'rename': did you mean set\?/],
    ['admin project env website', /did you mean set\?/],
    ['admin webhook test whk_1', /did you mean ping\?/],
    ['admin webhook pause whk_1', /did you mean disable\?/],
    ['admin webhook resume whk_1', /did you mean enable\?/],
    ['admin deployment watch dpl_1', /did you mean logs\?/],
    // Not restore, which is spelt nearly so and replaces the file.
    ['restart', /unknown command 'restart': did you mean serve\?/],
    ['admin project restart website', /did you mean davit serve\?/],
    ['admin project DELETE website', /did you mean archive\?/],
    ['admin key rm ci', /did you mean revoke\?/],
    ['admin webhook remove whk_1', /did you mean delete\?/],
    ['admin project ls', /did you mean list\?/],
    ['admin key new', /did you mean create\?/],
    ['admin deployment get dpl_1', /did you mean show\?/],
    ['admin deployment log dpl_1', /did you mean logs\?/],
    ['admin deployment stop dpl_1', /did you mean cancel\?/],
    ['help admin project stop', /did you mean pause\?/],
    ['start', /did you mean serve\?/],
    ['status', /did you mean davit admin queue\?/],
    ['admin ls', /unknown command 'ls' \(see 'davit admin --help'\)/],
    [
      'serve --webhook-allow-http=yes',
      /option '--webhook-allow-http' takes no value \(see 'davit serve --help'\)/,
    ],
    [
      'serve --retention never',
      /'--retention <duration>' argument is invalid\. It must be a duration .*, or off \(see/,
    ],
    ['serve --rate-limit 5', /such as 600\/1m, or off \(see/],
    ['serve --lissten x', /unknown option '--lissten': did you mean --listen\?/],
    ['serve --listen 8080', /--listen <host:port>.*such as 127\.0\.0\.1:8080.*see 'davit serve --help'/],
    ['serve --tls-cert cert.pem', /--tls-cert and --tls-key go together/],
    ['serve now', /too many arguments/],
    ['admin key show', /missing required argument 'key'/],
    ['admin key list --dbb x', /unknown option '--dbb': did you mean --db\?/],
    ['admin key show a b', /too many arguments.*davit admin key show --help/],
    ['admin key list --db', /option '--db <file>' argument missing/],
    ['admin key list --db=', /--db must be the path of a file/],
    ['admin key list --db :memory:', /--db must be the path of a file/],
    [
      'admin project create --name x --db new/',
      /--db must be the path of a file, not of a directory: add its name to 'new\/'/,
    ],
    ['admin project create --name x --dir -- make', /option '--dir <directory>' argument missing before --/],
    ['admin project create --name x --env A=1 --env -- make', /option '--env <name=value>' argument missing/],
    ['admin key create --name x --all-projects --scope --', /option '--scope <scope...>' argument missing/],
    ['admin project set x --db -- make', /option '--db <file>' argument missing before --/],
    ['help sreve', /unknown command 'sreve': did you mean serve\?/],
    ['help admin nonsense', /unknown command 'nonsense' \(see 'davit admin --help'\)/],
    ['admin key create', /required option '--name <name>' not specified/],
    ['admin key create --nmae x', /unknown option '--nmae': did you mean --name\?/],
    ['admin project create -- make --nmae', /required option '--name <name>' not specified/],
    ['deploy prj_x main --ulr http://x', /unknown option '--ulr': did you mean --url\?/],
    ['deploy prj_x main --key x', /unknown option '--key': did you mean --key-file\?/],
    ['deploy prj_x main --token x', /unknown option '--token': did you mean --key-file\?/],
    ['deploy prj_x main --follow', /unknown option '--follow': did you mean --wait\?/],
    ['verify --sceret x', /unknown option '--sceret': did you mean --secret\?/],
    ['verify', /required option '--secret <secret>' not specified: give it, or DAVIT_SIGNING_SECRET \(see/],
    ['serve --port 8080', /unknown option '--port': did you mean --listen\?/],
    ['serve -p 8080', /unknown option '-p': did you mean --listen\?/],
    ['serve --host 0.0.0.0', /unknown option '--host': did you mean --listen\?/],
    [
      'admin project create --name x --command ./x',
      /unknown option '--command': did you mean -- and the command after it\?/,
    ],
    ['admin project set x --command ./x', /did you mean -- and the command after it\?/],
    ['admin project create --x', /unknown option '--x' \(see/],
    ['admin project create ---', /unknown option '---' \(see/],
    ['admin project create -d /srv', /unknown option '-d' \(see/],
    ['admin queue -n 5', /unknown option '-n': did you mean --limit\?/],
    [
      'admin webhook create',
      /unknown command 'create': keys register webhooks with POST \/v2\/webhooks.* \(see/,
    ],
    ['admin webhook register', /unknown command 'register': keys register webhooks with POST/],
    ['admin webhook CREATE', /unknown command 'CREATE': keys register webhooks with POST/],
    ['admin webhook update whk_1', /unknown command 'update': keys .* PATCH \/v2\/webhooks\/\{id\}/],
    [
      'admin key create ci --all-scopes --all-projects',
      /too many arguments for 'create'.* but got 1, and '--name <name>' is missing \(/,
    ],
    ['completion tcsh', /^error: the shell must be one of bash, zsh, fish \(/],
    ['admin webhook replay --snice 1h', /unknown option '--snice': did you mean --since\?/],
  ];
  await Promise.all(
    cases.map(async ([line, message]) => {
      const refusal = await refused(line.split(' '));
      t.match(refusal, { exitCode: 2, message }, line);
    }),
  );
  t.strictSame(readdirSync(directory), [], 'none of them makes a file');
});

t.test('an error does not repeat a wrong value that may be a secret', async (t) => {
  const { refused, davit } = place(t);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  const key = newKeySecret(realEffects.randomBytes);
  const secret = newSigningSecret(realEffects.randomBytes);
  const user = 'http://user:s3cr3t@host/';
  const cases: [words: string[], message: RegExp][] = [
    [
      ['serve', '--listen', user],
      /^error: option '--listen <host:port>' argument is invalid\. It must be an/,
    ],
    [
      ['deploy', key, 'main'],
      /^error: the project id must be one such as prj_…, which 'davit admin project list' shows where the service is \(/,
    ],
    [['deploy', 'prj_1', `main' is invalid. ${key}`], /^error: the ref may hold only letters/],
    [
      ['deploy', 'prj_1', 'main', key, user],
      /too many arguments for 'deploy'\. Expected 2 arguments but got 4, and '--url <url>' is missing \(/,
    ],
    [['deploy', 'prj_1', 'main', `--key=${key}`], /unknown option '--key': did you mean --key-file\?$/],
    [['deploy', 'prj_1', 'main', '--key=a\ns3cr3t'], /unknown option '--key': did you mean --key-file\?$/],
    [['deploy', 'prj_1', 'a\ns3cr3t'], /^error: the ref may hold only letters/],
    [['deploy', 'prj_1', 'main', 'a\ns3cr3t'], /but got 3, and/],
    [['deploy', 'prj_1', 'main', `--ulr=${user}`], /unknown option '--ulr': did you mean --url\?$/],
    [
      ['deploy', 'prj_1', 'main', '--url', user],
      /'--url <url>' argument is invalid\. It must not hold a user/,
    ],
    [[key], /unknown command 'davit_…' \(/],
    [['admin', 'key', 'show', key], /there is no key 'davit_…':/],
    [['admin', 'project', 'show', secret], /there is no project 'whsec_…':/],
    [['admin', 'webhook', 'show', user], /there is no webhook 'http:\/\/…@host\/':/],
    // As $(cat …) gives it of a file with Windows line ends.
    [['admin', 'webhook', 'show', 'http://me:s3cr3t\r@host/'], /there is no webhook 'http:\/\/…@host\/':/],
    [['http://me:s3cr3t\r@host/'], /unknown command 'http:\/\/…@host\/' \(/],
    [['backup', '--db', `${key}.db`, 'copy.db'], /there is no file davit_…\.db:/],
    [
      ['backup', '--db', '/srv/davit_data/production/website/main.db', 'copy.db'],
      /there is no file \/srv\/davit_data\/production\/website\/main\.db:/,
    ],
  ];
  for (const [words, message] of cases) {
    const refusal = await refused(words);
    t.match(refusal.message, message);
    t.notMatch(refusal.message, /s3cr3t/);
    for (const hidden of [key, secret]) t.notOk(refusal.message.includes(hidden.slice(6)));
  }
  const { message } = await refused(['serve'], {
    env: { DAVIT_LISTEN: `s3cr3t\n${key}' from env 'X' is invalid` },
  });
  t.match(
    message,
    /^error: option '--listen <host:port>' value from env 'DAVIT_LISTEN' is invalid\. It must/,
  );
});

t.test('an empty variable counts as none, unless less would be protected without a word', async (t) => {
  const { davit, directory, refused } = place(t);
  const empty = (...names: string[]) => Object.fromEntries(names.map((name) => [`DAVIT_${name}`, '']));
  const key = ['admin', 'key', 'create', '--name', 'ci', '--all-projects'];
  t.match(await davit([...key, '--scope', 'logs:read'], { env: empty('ALL_SCOPES', 'JSON') }), {
    exitCode: 0,
    stdout: /^davit_\w+\n$/,
  });
  t.match(await refused([...key, '--all-scopes'], { env: empty('EXPIRES_IN') }), { exitCode: 2 });
  t.match(await refused(['serve'], { env: empty('TLS_CERT', 'TLS_KEY') }), { exitCode: 2 });
  t.match(await refused(key, { env: empty('SCOPE') }), { exitCode: 2, message: /say what the key may do/ });
  t.match(await davit(['admin', 'deployment', 'list'], { env: empty('STATUS', 'PROJECT', 'LIMIT') }), {
    exitCode: 0,
  });
  const deploy = ['deploy', 'prj_1', 'main', '--url', 'http://127.0.0.1:1'];
  const unset = empty('IDEMPOTENCY_KEY', 'KEY_FILE', 'CA_FILE', 'WAIT');
  t.match(await davit([...deploy, '--retry-for', '0'], { env: { ...unset, DAVIT_KEY: 'davit_key' } }), {
    exitCode: 1,
    stderr: /cannot be reached/,
  });
  t.match(await refused(['verify', '--header', 't=1,v1=0'], { env: empty('SIGNING_SECRET') }), {
    exitCode: 2,
    message: /required option '--secret <secret>' not specified/,
  });
  t.match(await refused(['verify', '--secret', 'whsec_x'], { env: empty('HEADER') }), { exitCode: 1 });
  t.match(await refused(['admin', 'project', 'list'], { env: empty('DB') }), {
    exitCode: 2,
    message: /--db must be the path of a file/,
  });
  const names = serveOptions().map(({ envVar }) => String(envVar));
  const env = Object.fromEntries(names.filter((name) => !name.includes('TLS')).map((name) => [name, '']));
  const service = await serveWithLog(t, directory, { env });
  t.match(service.url, /^http:/);
  t.equal(await service.stop(), 0);
});

t.test('davit help shows the help of every command', async (t) => {
  for (const path of ['', 'serve', 'admin', 'admin project', 'admin project create']) {
    const words = path.split(' ').filter((word) => word !== '');
    const help = await run([...words, '--help']);
    t.match(help, { stdout: /^Usage: davit/, exitCode: 0 });
    t.strictSame(await run(['help', ...words]), help);
    t.strictSame(await run([...words, '-h']), help);
  }
});

t.test('an error is one line without control characters, whatever was typed', async (t) => {
  const { refused } = place(t);
  for (const text of ['a\nb', '\u001b[2J', '\u009b2J', '\u202e']) {
    for (const words of [
      [text],
      ['admin', 'key', 'list', '--db', `${text}.db`],
      ['admin', 'key', text],
      [`--${text}`],
    ]) {
      const { message } = await refused(words);
      t.notMatch(message, /[\p{Cc}\u202e]/u);
    }
  }
});

t.test('the exit code is 0, 1 for a refusal, or 2 for wrong usage', async (t) => {
  const { davit } = place(t, runProcess);
  t.match(await davit(['admin', 'project', 'create', '--name', 'website']), { exitCode: 0, stdout: /^prj_/ });
  t.match(await davit(['admin', 'project', 'show', 'api']), { exitCode: 1, stdout: '', stderr: /^error: / });
  t.match(await davit(['admin', 'project', 'shwo']), { exitCode: 2, stdout: '', stderr: /^error: / });
});

t.test('a group without a command prints its help and exits with 2', async (t) => {
  const { stdout, stderr, exitCode } = await run(['admin', 'key']);
  t.match({ stdout, exitCode }, { stdout: '', exitCode: 2 });
  t.match(stderr, /^Usage: davit admin key/);
});

t.test('--db works before and after the command and wins over DAVIT_DB', async (t) => {
  const { davit, directory } = place(t);
  const made = await davit(['admin', 'project', 'create', '--name', 'website', '--db', 'other.db']);
  t.match(made, { exitCode: 0, stdout: /^prj_\w{24}\n$/ });
  t.notOk(existsSync(join(directory, 'davit.db')));
  const env = { DAVIT_DB: join(directory, 'other.db') };
  const lists = await Promise.all([
    davit(['--db', 'other.db', 'admin', 'project', 'list']),
    davit(['admin', '--db=other.db', 'project', 'list']),
    davit(['admin', 'project', 'list'], { env }),
    davit(['admin', 'project', 'list', '--db', 'other.db'], { env: { DAVIT_DB: 'nonsense.db' } }),
  ]);
  for (const { stdout } of lists) t.match(stdout, /website/);
});

t.test('a missing, foreign or unreachable file is refused with advice', async (t) => {
  const { refused, directory } = place(t);
  writeFileSync(join(directory, 'notes.txt'), 'these are my notes, not a database\n'.repeat(100));
  const [missing, foreign, unreachable] = await Promise.all([
    refused(['admin', 'key', 'list']),
    refused(['admin', 'project', 'list', '--db', 'notes.txt']),
    refused(['admin', 'project', 'create', '--name', 'x', '--db', 'nowhere/davit.db']),
  ]);
  t.match(missing, {
    exitCode: 1,
    message: /there is no file \.\/davit\.db: give its path with --db or DAVIT_DB/,
  });
  t.match(foreign, { exitCode: 1, message: /notes\.txt is not a davit file/ });
  t.match(unreachable, { exitCode: 1, message: /nowhere\/davit\.db.*choose another place with --db/ });
  t.notOk(existsSync(join(directory, 'davit.db')));
});

t.test('special characters in --db are part of the file name', async (t) => {
  const { davit, refused, directory } = place(t);
  mkdirSync(join(directory, 'my files'));
  const paths = [
    'my files/a b.db',
    'a%41?mode=memory#x.db',
    'file:abc.db',
    'file::memory:',
    '日本.db',
    '-wal',
  ];
  for (const path of paths) {
    t.match(await davit(['admin', 'project', 'create', '--name', 'website', `--db=${path}`]), {
      exitCode: 0,
    });
    t.match(await davit(['admin', 'project', 'list', `--db=${join(directory, path)}`]), {
      stdout: /website/,
    });
  }
  const copies = ['copy%41?mode=ro#x.db', 'file:copy.db'];
  for (const copy of copies) t.match(await davit(['backup', copy, '--db=file:abc.db']), { exitCode: 0 });
  const found = [...readdirSync(directory), ...readdirSync(join(directory, 'my files'))];
  t.strictSame(
    found.filter((name) => name !== 'my files').sort(),
    [...paths.map((path) => basename(path)), ...copies].sort(),
  );
  for (const path of [' sp.db', 'sp.db ']) {
    t.match(await refused(['admin', 'project', 'create', '--name', 'x', `--db=${path}`]), {
      exitCode: 2,
      message: /--db must not begin or end with white space/,
    });
  }
});

t.test('--db may be as long as all files beside it allow, and no longer', async (t) => {
  const { davit, refused, directory } = place(t);
  // Characters of two bytes each.
  const longest = 'ü'.repeat(100);
  const folder = join(directory, 'd'.repeat(250));
  mkdirSync(folder);
  const longestPath = join(folder, 'x'.repeat(400 - folder.length - 1));
  for (const db of [longest, longestPath]) {
    t.match(await davit(['admin', 'project', 'create', '--name', 'website', `--db=${db}`]), { exitCode: 0 });
    t.match(await davit(['backup', 'copy.db', `--db=${db}`]), { exitCode: 0 });
    t.match(await davit(['restore', 'copy.db', '--yes', `--db=${db}`]), { exitCode: 0 });
    rmSync(join(directory, 'copy.db'));
  }
  symlinkSync(`${longest}x`, join(directory, 'link'));
  const before = readdirSync(directory, { recursive: true });
  for (const db of [`${longest}x`, 'x'.repeat(300), `${longestPath}x`, 'link']) {
    for (const words of [['admin', 'project', 'create', '--name', 'x'], ['doctor'], ['serve']]) {
      t.match(await refused([...words, `--db=${db}`]), {
        exitCode: 2,
        message:
          /^error: --db must be a path of at most 400 bytes, the name at its end of at most 200: files/,
      });
    }
  }
  t.strictSame(readdirSync(directory, { recursive: true }), before);
});

t.test('an unusable or newer file is refused and left as it is', async (t) => {
  const { refused, davit, directory, dbPath } = place(t);
  symlinkSync('loop', join(directory, 'loop'));
  writeFileSync(join(directory, 'empty'), '');
  execFileSync('mkfifo', [join(directory, 'pipe')]);
  const cases: [path: string, message: RegExp][] = [
    ['.', /^error: \. is a directory: give the path of a file with --db or DAVIT_DB$/],
    ['pipe', /^error: pipe is not a regular file: give the path of a file with --db or DAVIT_DB$/],
    ['loop', /^error: cannot access loop \(ELOOP\): run this as a user who can/],
    ['empty', /^error: empty is not a davit file, as it is empty/],
    ['empty/davit.db', /^error: there is no file empty\/davit\.db/],
  ];
  for (const [path, message] of cases) {
    for (const words of [['admin', 'key', 'list'], ['doctor'], ['backup', 'copy.db']]) {
      t.match(await refused([...words, '--db', path]), { exitCode: 1, message }, path);
    }
  }
  t.equal(statSync(join(directory, 'empty')).size, 0);
  await davit(['admin', 'project', 'create', '--name', 'website']);
  changeFile(dbPath, 'PRAGMA user_version = 999');
  for (const words of [['admin', 'key', 'list'], ['doctor'], ['backup', 'copy.db'], ['serve']]) {
    t.match(await refused(words), { exitCode: 1, message: /needs a newer davit: its schema is 999/ });
  }
  t.strictSame(
    readdirSync(directory).filter((name) => !name.endsWith('-lock')),
    ['davit.db', 'empty', 'loop', 'pipe'],
  );
});

t.test('a closed stdout is no failure', async (t) => {
  const child = spawn(process.execPath, [MAIN, 'serve', '--help'], {
    env: COMPILE_CACHE,
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  child.stdout.destroy();
  const stderr = text(child.stderr);
  t.strictSame(await once(child, 'exit'), [0, null]);
  t.equal(await stderr, '');
});

t.test(
  'output that cannot be written is a failure',
  existsSync('/dev/full') ? {} : { skip: 'needs /dev/full' },
  async (t) => {
    const child = spawn('sh', ['-c', 'exec "$0" "$@" >/dev/full', process.execPath, MAIN, '--help'], {
      env: COMPILE_CACHE,
      stdio: ['ignore', 'ignore', 'pipe'],
    });
    const stderr = text(child.stderr);
    t.strictSame(await once(child, 'exit'), [1, null]);
    t.match(await stderr, /^error: the output is lost: ENOSPC/);
  },
);

function commandsIn(help: string): string[] {
  const [, section = ''] = /^Commands:\n((?: {2}.*\n)+)/m.exec(help) ?? [];
  return [...section.matchAll(/^ {2}([\w-]+)/gm)].map(([, name]) => name ?? '');
}
