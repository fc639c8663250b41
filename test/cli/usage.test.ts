import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import t from 'tap';
import { version } from '../../src/assets.ts';
import { COMPILE_CACHE, MAIN, place, run } from '../helpers/cli.ts';

t.test('--version is the version and nothing else', async (t) => {
  t.strictSame(await run(['--version']), { stdout: `${version}\n`, stderr: '', exitCode: 0 });
});

t.test('--help fits 80 columns and lists every command', async (t) => {
  const helps = await Promise.all(
    ['', 'admin', 'admin key', 'admin project', 'admin deployment', 'admin webhook'].map((path) =>
      run([...path.split(' '), '--help'].filter((word) => word !== '')),
    ),
  );
  for (const { stdout, stderr, exitCode } of helps) {
    t.strictSame([stderr, exitCode], ['', 0]);
    t.match(stdout, /^Usage: davit/);
    t.strictSame(
      stdout.split('\n').filter((line) => line.length > 80),
      [],
    );
  }
  t.strictSame(
    helps.map(({ stdout }) => commandsIn(stdout)),
    [
      ['serve', 'deploy', 'verify', 'backup', 'restore', 'doctor', 'admin', 'help'],
      ['project', 'key', 'deployment', 'webhook', 'queue', 'migrate', 'systemd-unit'],
      ['create', 'list', 'show', 'rotate', 'revoke'],
      ['create', 'list', 'show', 'set', 'pause', 'resume', 'archive', 'check'],
      ['create', 'list', 'show', 'logs', 'cancel', 'redeploy'],
      ['list', 'show', 'enable', 'disable', 'delete', 'ping', 'deliveries', 'replay'],
    ],
  );
});

t.test('--help tells of every option its variable', async (t) => {
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

t.test('wrong usage is one line that says what to do, and exit code 2', async (t) => {
  const { refused, directory } = place(t);
  const cases: [line: string, message: RegExp][] = [
    ['sevre', /unknown command 'sevre': did you mean serve\?/],
    ['admin key lst', /unknown command 'lst': did you mean list\?/],
    ['admin nonsense', /unknown command 'nonsense' \(see 'davit admin --help'\)/],
    ['serve --lissten x', /unknown option '--lissten': did you mean --listen\?/],
    ['serve --listen 8080', /--listen <host:port>.*such as 127\.0\.0\.1:8080.*see 'davit serve --help'/],
    ['serve --tls-cert cert.pem', /--tls-cert and --tls-key go together/],
    ['serve now', /too many arguments/],
    ['admin key show', /missing required argument 'key'/],
    ['admin key show a b', /too many arguments.*davit admin key show --help/],
    ['admin key list --db', /option '--db <file>' argument missing/],
    ['admin key list --db=', /--db must be the path of a file/],
    ['admin key list --db :memory:', /--db must be the path of a file/],
    ['admin key create', /required option '--name <name>' not specified/],
  ];
  await Promise.all(
    cases.map(async ([line, message]) => {
      const refusal = await refused(line.split(' '));
      t.match(refusal, { exitCode: 2, message }, line);
    }),
  );
  t.notOk(existsSync(join(directory, 'davit.db')), 'none of them makes a file');
});

t.test('a group without a command shows its help, and that is exit code 2', async (t) => {
  const { stdout, stderr, exitCode } = await run(['admin', 'key']);
  t.match({ stdout, exitCode }, { stdout: '', exitCode: 2 });
  t.match(stderr, /^Usage: davit admin key/);
});

t.test('--db counts before and after the command, and its variable when neither says so', async (t) => {
  const { davit, directory } = place(t);
  const made = await davit(['admin', 'project', 'create', '--name', 'website', '--db', 'other.db']);
  t.match(made, { exitCode: 0, stdout: /^prj_\w{22}\n$/ });
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

t.test('a file that is not there, not ours or not for us is refused with what to do', async (t) => {
  const { refused, directory } = place(t);
  writeFileSync(join(directory, 'notes.txt'), 'these are my notes, not a database\n'.repeat(100));
  const [missing, foreign, unreachable] = await Promise.all([
    refused(['admin', 'key', 'list']),
    refused(['admin', 'project', 'list', '--db', 'notes.txt']),
    refused(['admin', 'project', 'create', '--name', 'x', '--db', 'nowhere/davit.db']),
  ]);
  t.match(missing, { exitCode: 1, message: /there is no file \.\/davit\.db: say with --db or DAVIT_DB/ });
  t.match(foreign, { exitCode: 1, message: /notes\.txt is not a davit file/ });
  t.match(unreachable, { exitCode: 1, message: /nowhere\/davit\.db.*choose another place with --db/ });
  t.notOk(existsSync(join(directory, 'davit.db')));
});

t.test('a reader that goes away early is no failure', async (t) => {
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
