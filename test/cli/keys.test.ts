import t from 'tap';
import { type Key, SCOPES } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { isKeySecret } from '../../src/secrets.ts';
import { openStore } from '../../src/store/store.ts';
import { type Place, place } from '../helpers/cli.ts';
import { changeFile } from '../helpers/files.ts';
import { needsTerminal, onTerminal } from '../helpers/terminal.ts';

const ALL = ['--all-scopes', '--all-projects'];
const create = (name: string, ...rest: string[]) => ['admin', 'key', 'create', '--name', name, ...rest];

t.test('a new key prints only its secret on stdout, and says that it is shown once', async (t) => {
  const there = place(t);
  const { stdout, stderr, exitCode } = await there.davit(create('ci', ...ALL));
  t.equal(exitCode, 0);
  t.ok(isKeySecret(stdout.trimEnd()));
  t.match(
    stderr,
    /^created the file .*\ncreated key ci \(key_\w+\); this is its secret, which is shown only once: save it now\n$/,
  );
  t.match(holderOf(there, stdout.trimEnd()), { allProjects: true, scopes: SCOPES });
  t.notOk(JSON.stringify(there.dump()).includes(stdout.trimEnd()));
});

t.test('the name of a key has at most 100 characters, and an emoji counts as one', async (t) => {
  const { davit, refused } = place(t);
  t.match(await davit(create('🔑'.repeat(100), ...ALL)), { exitCode: 0 });
  t.match(await refused(create('🔑'.repeat(101), ...ALL)), {
    exitCode: 2,
    message: /at most 100 characters/,
  });
});

t.test('a key has exactly the scopes, projects and expiry that were given', async (t) => {
  const there = place(t);
  const website = await projectOf(there, 'website');
  const api = await projectOf(there, 'api');
  await projectOf(there, 'other');
  const key = await there.json<Key & { secret: string }>(
    create(
      'ci',
      '--scope',
      'logs:read',
      'deployments:write',
      '--scope',
      'logs:read',
      '--project',
      'website',
      api,
      '--expires-in',
      '90d',
    ),
  );
  t.strictSame(key.scopes, ['logs:read', 'deployments:write'], 'each once');
  t.match(key, {
    name: 'ci',
    all_projects: false,
    revoked_at: null,
    last4: key.secret.slice(-4),
  });
  t.strictSame(new Set(key.project_ids), new Set([website, api]));
  t.equal(Date.parse(key.expires_at ?? '') - Date.parse(key.created_at), 90 * 86_400_000);
  t.match(holderOf(there, key.secret), { keyId: key.id });
});

t.test('a key needs explicit scopes and projects, all of which exist', async (t) => {
  const there = place(t);
  t.match(await there.refused(create('ci', '--all-scopes', '--project', 'website')), {
    exitCode: 1,
    message: /there is no file/,
  });
  await projectOf(there, 'website');
  await projectOf(there, 'twin');
  await projectOf(there, 'twin');
  const cases: [words: string[], exitCode: number, message: RegExp][] = [
    [
      ['--all-scopes'],
      2,
      /say what the key sees: --project <project>, which may be repeated, or --all-projects/,
    ],
    [
      ['--all-projects'],
      2,
      /say what the key may do: --scope <scope>, which may be repeated, or --all-scopes/,
    ],
    [[...ALL, '--scope', 'logs:read'], 2, /--scope and --all-scopes exclude each other/],
    [[...ALL, '--project', 'website'], 2, /--project and --all-projects exclude each other/],
    [
      ['--all-projects', '--scope', 'deployment:write'],
      2,
      /no scope 'deployment:write': did you mean deployments:write\?.*webhooks:write/,
    ],
    [['--all-projects', '--scope', ''], 2, /there is no scope ''/],
    [['--all-scopes', '--project', 'webstie'], 1, /there is no project 'webstie': did you mean 'website'\?/],
    [['--all-scopes', '--project', 'website', 'prj_0000000000000000000000'], 1, /there is no project 'prj_0/],
    [['--all-scopes', '--project', 'twin'], 1, /several projects are named 'twin': use the id/],
    [[...ALL, '--expires-in', '90'], 2, /--expires-in <duration>.*such as 10s/],
    [[...ALL, '--expires-in', '0'], 2, /--expires-in/],
    [[...ALL, '--expires-in', '99999d'], 2, /--expires-in <duration>.* at most 36500d/],
  ];
  await Promise.all(
    cases.map(async ([words, exitCode, message]) => {
      t.match(await there.refused(create('ci', ...words)), { exitCode, message }, words.join(' '));
    }),
  );
});

t.test('create warns of a name that another living key has', async (t) => {
  const there = place(t);
  const warning = /warning: 2 keys have this name now: use their ids\n$/;
  const made = async () => (await there.davit(create('ci', ...ALL))).stderr;
  t.notMatch(await made(), warning);
  t.match(await made(), warning);
  const [first] = await there.json<Key[]>(['admin', 'key', 'list']);
  await there.davit(['admin', 'key', 'revoke', first?.id ?? '', '--yes']);
  t.match(await made(), warning, 'the revoked one does not count');
});

t.test('a name with control, invisible or misleading characters is refused', async (t) => {
  const there = place(t);
  for (const name of [
    ...['', ' ci', 'ci\n', 'a\u001b[2Jb', '-ci', 'key_1', 'x'.repeat(101)],
    ...['ci\u202etxt', 'c\u200bi', 'ci\u2066', '\ufeffci', 'c\u00adi', '\u{e0041}'],
  ]) {
    const { exitCode, message } = await there.refused(['admin', 'key', 'create', `--name=${name}`, ...ALL]);
    t.equal(exitCode, 2);
    t.match(message, /the name must/);
  }
});

t.test('options win over variables, and a variable of 0 or false does not switch an option on', async (t) => {
  const there = place(t);
  const website = await projectOf(there, 'website');
  const { stdout } = await there.davit(create('ci', '--project', 'website', '--json'), {
    env: { DAVIT_ALL_PROJECTS: '1', DAVIT_SCOPE: 'logs:read,projects:read', DAVIT_ALL_SCOPES: '0' },
  });
  t.match(JSON.parse(stdout), {
    all_projects: false,
    project_ids: [website],
    scopes: ['logs:read', 'projects:read'],
  });
  const everything = await there.davit(create('ops', ...ALL, '--json'), {
    env: { DAVIT_PROJECT: 'website', DAVIT_SCOPE: 'logs:read' },
  });
  t.match(JSON.parse(everything.stdout), { all_projects: true, scopes: SCOPES });
  const refusals = await Promise.all([
    there.refused(create('ci', '--all-scopes'), { env: { DAVIT_ALL_PROJECTS: 'false' } }),
    there.refused(create('ci', '--all-scopes'), { env: { DAVIT_ALL_PROJECTS: 'perhaps' } }),
    there.refused(create('ci', ...ALL), { env: { DAVIT_EXPIRES_IN: 'soon' } }),
  ]);
  for (const { exitCode } of refusals) t.equal(exitCode, 2);
});

t.test('keys are listed and shown without their secrets', async (t) => {
  const there = place(t);
  t.strictSame(await there.refused(['admin', 'key', 'list']).then(({ exitCode }) => exitCode), 1);
  await projectOf(there, 'website');
  t.match(await there.davit(['admin', 'key', 'list']), {
    stdout: '',
    stderr: /there are no keys yet/,
    exitCode: 0,
  });
  const { secret, ...key } = await there.json<Key & { secret: string }>(
    create('ci', '--scope', 'logs:read', '--project', 'website'),
  );
  const [list, listed, show, shown] = await Promise.all([
    there.davit(['admin', 'key', 'list']),
    there.json<Key[]>(['admin', 'key', 'list']),
    there.davit(['admin', 'key', 'show', 'ci']),
    there.json<Key>(['admin', 'key', 'show', key.id]),
  ]);
  t.strictSame(listed, [key]);
  t.strictSame(shown, { ...key, old_secrets: [] });
  t.match(
    list.stdout,
    new RegExp(`^ID +NAME +SECRET .*\n${key.id} +ci +…${key.last4} +live +never +website +logs:read\n$`),
  );
  t.match(show.stdout, new RegExp(`^id +${key.id}$`, 'm'));
  t.match(show.stdout, new RegExp(`^created +${key.created_at}$`, 'm'), 'ISO 8601 for a program');
  for (const { stdout } of [list, show]) t.notOk(stdout.includes(secret));
});

t.test('show prints scopes, projects and the times of use, expiry and revocation', async (t) => {
  const there = place(t);
  const shown = async () => (await there.davit(['admin', 'key', 'show', 'ci'])).stdout;
  const { id } = await there.json<Key>(create('ci', ...ALL));
  t.equal(
    (await shown()).replace(/…\w{4}/, '…').replace(/20\S+Z/, 'then'),
    [
      `id         ${id}`,
      'name       ci',
      'state      live',
      'secret     …',
      `scopes     ${SCOPES.join(' ')}`,
      'projects   all, later ones too',
      'created    then',
      'last used  never',
      'expires    never\n',
    ].join('\n'),
  );
  t.match((await there.davit(['admin', 'key', 'list'])).stdout, / live {3}never {2}all {7}all\n$/);

  const website = await projectOf(there, 'website');
  changeFile(
    there.dbPath,
    `UPDATE keys SET all_projects = 0, last_used_at = 86400000, expires_at = 172800000, revoked_at = 259200000;
    INSERT INTO key_projects SELECT keys.id, projects.id FROM keys, projects`,
  );
  for (const line of [
    'state      revoked',
    `projects   website (${website})`,
    'last used  1970-01-02T00:00:00.000Z',
    'expires    1970-01-03T00:00:00.000Z',
    'revoked    1970-01-04T00:00:00.000Z',
  ]) {
    t.ok((await shown()).split('\n').includes(line), line);
  }
  t.match(
    (await there.davit(['admin', 'key', 'list'])).stdout,
    / revoked {2}1970-01-02T\S+Z {2}website {3}all\n$/,
  );
});

t.test('the list shows when a key expires', async (t) => {
  const there = place(t);
  const { expires_at } = await there.json<Key>(create('ci', ...ALL, '--expires-in', '90d'));
  t.match(
    (await there.davit(['admin', 'key', 'list'])).stdout,
    new RegExp(` live until ${expires_at}  never`),
  );
  await there.davit(['admin', 'key', 'revoke', 'ci', '--yes']);
  t.match((await there.davit(['admin', 'key', 'list'])).stdout, / revoked {2,}never/);
});

t.test('the list of keys fits a terminal of 80 columns', needsTerminal, async (t) => {
  const there = place(t);
  await there.davit(create('quite a long name', '--expires-in', '365d', ...ALL));
  await there.davit(create('for ever', ...ALL));
  await projectOf(there, 'website-of-everybody');
  const some = ['--project', 'website-of-everybody', '--scope', 'logs:read', '--scope', 'deployments:write'];
  await there.davit(create('reader', ...some));
  await there.davit(['admin', 'key', 'revoke', 'reader', '--yes']);
  const { shown } = onTerminal(there, ['admin', 'key', 'list']);
  t.match(
    shown,
    /\nNAME {6}quite a long name\nSECRET .*\nSTATE {5}364d left\nUSED {6}never\nPROJECTS {2}all\n/,
  );
  t.match(shown, /\nNAME {6}for ever\n.*\nSTATE {5}live\n/);
  t.match(shown, /\nNAME {6}reader\n.*\nSTATE {5}revoked\n.*\nPROJECTS {2}website-of-everybody\n/);
  t.ok(shown.split('\n').every((line) => line.length <= 80));
});

t.test('a rotated key keeps its id, and its old secret works for the overlap', async (t) => {
  const there = place(t);
  const first = await there.json<Key & { secret: string }>(create('ci', ...ALL));
  const second = await there.json<Key & { secret: string }>([
    'admin',
    'key',
    'rotate',
    'ci',
    '--overlap',
    '24h',
  ]);
  t.equal(second.id, first.id);
  for (const { secret } of [first, second]) t.match(holderOf(there, secret), { keyId: first.id });
  t.match(await there.davit(['admin', 'key', 'show', 'ci']), {
    stdout: new RegExp(`^old secret +…${first.last4}, until 20`, 'm'),
  });
  t.match(await there.json(['admin', 'key', 'show', 'ci']), {
    last4: second.last4,
    old_secrets: [{ last4: first.last4, expires_at: /^20\d\d-.*Z$/ }],
  });
  t.match(
    (await there.davit(['admin', 'key', 'rotate', 'ci', '--overlap', '36h'])).stderr,
    /^key ci \(key_\w+\) has a new secret; the old one ends in 1d12h; this is its secret/,
  );
  const third = await there.davit(['admin', 'key', 'rotate', first.id]);
  t.match(
    (await there.davit(['admin', 'key', 'show', 'ci'])).stdout,
    /^created +20.*\nrotated +20.*\nlast used/m,
    'whoever has the old secret is told only that it is wrong',
  );
  t.match(third.stderr, /^key ci \(key_\w+\) has a new secret; the old one ended; this is its secret/);
  for (const { secret } of [first, second]) t.equal(holderOf(there, secret), undefined);
  t.match(holderOf(there, third.stdout.trim()), { keyId: first.id });
});

t.test('the old secret of a rotated key ends no later than the key, and that is what is said', async (t) => {
  const there = place(t);
  const { last4, expires_at } = await there.json<Key>(create('ci', ...ALL, '--expires-in', '1h'));
  t.match(
    (await there.davit(['admin', 'key', 'rotate', 'ci', '--overlap', '24h'])).stderr,
    new RegExp(
      `^key ci \\(key_\\w+\\) has a new secret; the old one ends with the key, at ${expires_at}; this is`,
    ),
  );
  t.match((await there.davit(['admin', 'key', 'show', 'ci'])).stdout, `…${last4}, until ${expires_at}\n`);
});

t.test('revoking a key needs --yes and is final', async (t) => {
  const there = place(t);
  const { secret } = await there.json<Key & { secret: string }>(create('ci', ...ALL));
  t.match(await there.refused(['admin', 'key', 'revoke', 'ci']), {
    exitCode: 2,
    message: /give --yes/,
  });
  t.ok(holderOf(there, secret));
  t.match(await there.davit(['admin', 'key', 'revoke', 'ci', '--yes']), {
    stdout: /^key ci .* is revoked\n$/,
    exitCode: 0,
  });
  t.equal(holderOf(there, secret), undefined);
  t.match(await there.davit(['admin', 'key', 'revoke', 'ci']), {
    stdout: /was revoked already/,
    exitCode: 0,
  });
  t.match(await there.refused(['admin', 'key', 'rotate', 'ci']), {
    exitCode: 1,
    message: /revoked: create a new one/,
  });
  t.match(await there.refused(['admin', 'key', 'revoke', 'ic', '--yes']), {
    exitCode: 1,
    message: /there is no key 'ic'/,
  });
});

t.test('a name means the live key of that name', async (t) => {
  const there = place(t);
  await there.davit(create('ci', ...ALL));
  await there.davit(['admin', 'key', 'revoke', 'ci', '--yes']);
  const living = await there.json<Key>(create('ci', ...ALL));
  t.equal((await there.json<Key>(['admin', 'key', 'show', 'ci'])).id, living.id);
  await there.davit(create('ci', ...ALL));
  t.match(await there.refused(['admin', 'key', 'revoke', 'ci', '--yes']), {
    exitCode: 1,
    message: /several keys are named 'ci'/,
  });
});

t.test('on a terminal, revoke asks, and only yes revokes', needsTerminal, async (t) => {
  const there = place(t);
  await there.davit(create('ci', ...ALL));
  const before = there.dump();
  const revoke = ['admin', 'key', 'revoke', 'ci'];
  const no = onTerminal(there, revoke, { typed: 'n\n' });
  t.match(no, { exitCode: 1, shown: /Revoke key ci \(key_\w+\)\? \[y\/N\] .*nothing was changed/s });
  t.strictSame(there.dump(), before);
  t.match(onTerminal(there, revoke, { typed: 'y\n' }), { exitCode: 0, shown: /is revoked/ });
  t.match(onTerminal(there, ['admin', 'key', 'list']), { exitCode: 0, shown: /ci +…\w{4} +revoked +never/ });
});

/** The key that this secret authenticates now. */
function holderOf({ dbPath }: Place, secret: string) {
  const store = openStore(dbPath, realEffects);
  try {
    return store.reads.keys.authenticate(secret, realEffects.now());
  } finally {
    void store.close();
  }
}

async function projectOf({ davit }: Place, name: string): Promise<string> {
  const { stdout } = await davit(['admin', 'project', 'create', '--name', name]);
  return stdout.trim();
}
