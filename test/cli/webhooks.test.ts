import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { Webhook as StandardWebhook } from 'standardwebhooks';
import t, { type Test } from 'tap';
import type { Attempt, Delivery, KeyId, WebhookId } from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import type { WebhookBacklog } from '../../src/store/backlog.ts';
import type { Replay } from '../../src/store/replays.ts';
import type { WebhookWithSecret } from '../../src/store/webhooks.ts';
import { inFile } from '../helpers/administration.ts';
import { type Place, place } from '../helpers/cli.ts';
import { changeFile } from '../helpers/files.ts';
import { dueOf, settlementOf } from '../helpers/outbox.ts';
import { type Receiver, silence, startReceiver, status } from '../helpers/receiver.ts';
import { serve } from '../helpers/served.ts';
import { newDeployment } from '../helpers/store.ts';
import { needsTerminal, onTerminal } from '../helpers/terminal.ts';

const webhook = (...words: string[]) => ['admin', 'webhook', ...words];

/** Options that allow receivers on this machine. */
const OPENED = ['--webhook-allow-http', '--webhook-allow-cidr', '127.0.0.0/8'];

t.test('webhooks are listed with their backlog and shown without their secrets', async (t) => {
  const there = await file(t);
  t.match(await there.davit(webhook('list')), { stdout: '', stderr: /there are no webhooks/, exitCode: 0 });
  const first = await register(there, 'https://one.test/');
  const second = await register(there, 'https://two.test/', { description: 'status page' });
  await deploy(there, 2);
  await there.davit(webhook('disable', second.id));

  const [list, listed, show, shown] = await Promise.all([
    there.davit(webhook('list')),
    there.json<WebhookBacklog[]>(webhook('list')),
    there.davit(webhook('show', second.id)),
    there.json<WebhookBacklog>(webhook('show', 'https://two.test/')),
  ]);
  t.match(listed, [
    {
      id: first.id,
      url: 'https://one.test/',
      status: 'enabled',
      pending_count: 2,
      due_count: 2,
      held_count: 0,
    },
    { id: second.id, status: 'disabled', pending_count: 0, held_count: 2, consecutive_failures: 0 },
  ]);
  t.strictSame(shown, listed[1], 'a URL that one webhook has names it');
  t.match(shown, { created_by: { key_id: there.keyId, name: 'ci' }, events: ['deployment.created'] });
  t.match(
    list.stdout,
    new RegExp(
      `^ID +URL +STATUS +WAITING +LAST ERROR +KEY +EVENTS\n${first.id} +https://one\\.test/ +enabled +2 +ci `,
    ),
  );
  t.match(
    list.stdout,
    new RegExp(`^${second.id} +https://two\\.test/ +disabled +2 +disabled by the administrator +ci `, 'm'),
    'also what is held, and why',
  );
  t.match(show.stdout, /^status +disabled: disabled by the administrator$/m);
  t.match(show.stdout, /^held +2$/m);
  t.notMatch(show.stdout, /^(?:pending|next attempt) /m);
  t.match(show.stdout, /^description +status page$/m);
  for (const { stdout } of [list, show]) t.notMatch(stdout, /whsec_/);
  t.notMatch(JSON.stringify([listed, shown]), /whsec_/);
});

t.test(
  'a running service sends held deliveries once a webhook is enabled, and again at a replay',
  async (t) => {
    const there = await file(t);
    const receiver = await startReceiver(t);
    const { id } = await register(there, receiver.url);
    await there.davit(webhook('disable', id));
    await deploy(there, 2);
    await serve(t, there.directory, ...OPENED);
    const enabled = await there.davit(webhook('enable', id));
    t.match(enabled, {
      stdout: /^webhook whk_\w+ \(http:\S+\) is enabled; 2 deliveries held for it will be sent now\n$/,
    });
    t.equal(enabled.stderr, '');
    const sent = [await eventOf(receiver), await eventOf(receiver)];
    t.strictSame(new Set(sent.map(({ type }) => type)), new Set(['deployment.created']));

    const replayed = await there.davit(webhook('replay', id, '--since', '1h'));
    t.match(replayed, {
      stdout: /^2 deliveries to webhook whk_\w+ \(\S+\) will be sent again\n$/,
      stderr: '',
      exitCode: 0,
    });
    const again = [await eventOf(receiver), await eventOf(receiver)];
    t.strictSame(new Set(again.map((event) => event.id)), new Set(sent.map((event) => event.id)));
  },
);

t.test('a webhook whose key has expired is listed and shown as one that gets no new events', async (t) => {
  const there = await file(t);
  const { id } = await register(there, 'https://one.test/');
  changeFile(there.dbPath, "UPDATE keys SET expires_at = unixepoch('2026-11-21T08:00:00') * 1000");
  const [list, show, shown] = await Promise.all([
    there.davit(webhook('list')),
    there.davit(webhook('show', id)),
    there.json<WebhookBacklog>(webhook('show', id)),
  ]);
  t.match(list.stdout, new RegExp(`^${id} +https://one\\.test/ +key expired +ci `, 'm'));
  t.match(show.stdout, /^new events +none: its key expired at 2026-11-21T08:00:00\.000Z$/m);
  t.match(shown, { status: 'enabled', created_by: { expires_at: '2026-11-21T08:00:00.000Z' } });
  t.match(await there.davit(webhook('disable', id)), { stdout: /is disabled\n$/, stderr: '' });
  t.match(
    (await there.davit(webhook('list'))).stdout,
    new RegExp(`^${id} +https://one\\.test/ +disabled `, 'm'),
  );
  t.match(await there.davit(webhook('enable', id)), {
    stdout: /is enabled\n$/,
    stderr:
      /^note: it gets no new events, as its key expired at 2026-11-21T08:00:00\.000Z: register it again/,
  });
  changeFile(there.dbPath, 'UPDATE keys SET expires_at = NULL');
  t.notMatch((await there.davit(webhook('show', id))).stdout, /new events/);
});

t.test('a webhook is found by its URL, also in the form in which it was registered', async (t) => {
  const there = await file(t);
  const { id } = await register(there, 'https://one.test/');
  for (const url of ['https://one.test/', 'https://one.test', 'HTTPS://ONE.test:443']) {
    t.match(await there.json<WebhookBacklog>(webhook('show', url)), { id }, url);
  }
});

t.test('enable and disable say what becomes of pending deliveries', async (t) => {
  const there = await file(t);
  const { id } = await register(there, 'https://one.test/');
  await deploy(there, 1);
  const say = async (word: string) => await there.davit(webhook(word, id));
  t.match(await say('disable'), {
    stdout: /is disabled; 1 delivery will be held until it is enabled\n$/,
    stderr: '',
  });
  t.match(await say('disable'), { stdout: /is already disabled\n$/, stderr: '' });
  t.match(there.dump()['webhooks'], [{ status: 'disabled', status_reason: 'disabled by the administrator' }]);
  t.match(await say('enable'), {
    stdout: /is enabled; 1 delivery held for it will be sent now\n$/,
    stderr: "note: no service is running: 'davit serve' sends it\n",
  });
  t.match(await say('enable'), { stdout: /is already enabled\n$/, stderr: '' });
  await deploy(there, 1);
  await say('disable');
  t.match(await say('enable'), {
    stdout: /is enabled; 2 deliveries held for it will be sent now\n$/,
    stderr: "note: no service is running: 'davit serve' sends them\n",
  });
  t.match(there.dump()['webhooks'], [{ status: 'enabled', status_reason: null }]);
});

t.test('a delivery that waits for a retry is due once its webhook is enabled', async (t) => {
  const there = await file(t);
  const { id } = await register(there, 'https://one.test/');
  await deploy(there, 1);
  await failOnce(there, id);
  await there.davit(webhook('disable', id));
  t.match(await there.json(webhook('enable', id)), { id, status: 'enabled', due_count: 1 });
  const { stdout } = await there.davit(webhook('show', id));
  t.match(stdout, /^pending +1, 1 of them due$/m);
  t.match(stdout, /^next attempt +20\S+Z$/m, 'not now: no service runs to make it');
});

t.test('a webhook whose receiver fails is listed with what it answered', async (t) => {
  const there = await file(t);
  const { id } = await register(there, 'https://one.test/');
  await deploy(there, 1);
  await failOnce(there, id);
  const { stdout } = await there.davit(webhook('list'));
  t.match(stdout, /^ID +URL +STATUS +WAITING +LAST FAILURE +FAILED +LAST ERROR +KEY /);
  t.match(stdout, new RegExp(`^${id} +https://one\\.test/ +enabled +1 +\\S+Z +1× +500 +ci `, 'm'));
  const shown = await there.davit(webhook('show', id));
  for (const line of [
    /^last success +never$/m,
    /^last failure +20\S+Z/m,
    /^failing since +20\S+Z/m,
    /^failures in a row +1$/m,
    /^pending +1, 0 of them due$/m,
    /^next attempt +20\S+Z/m,
    /^last error +500$/m,
  ])
    t.match(shown.stdout, line);
  t.notMatch(shown.stdout, /^held /m);
});

t.test('deleting a webhook needs --yes and is final', async (t) => {
  const there = await file(t);
  const { id, signing_secret } = await register(there, 'https://one.test/');
  const other = await register(there, 'https://other.test/');
  await deploy(there, 3);
  t.match(await there.refused(webhook('delete', id)), { exitCode: 2, message: /give --yes/ });
  t.match(await there.json(webhook('delete', other.id, '--yes')), { id: other.id, pending_count: 3 });
  t.match(await there.davit(webhook('delete', id, '--yes')), {
    stdout: /^webhook whk_\w+ .* is deleted\n$/,
    exitCode: 0,
  });
  t.strictSame(await there.json(webhook('list')), []);
  t.notOk(JSON.stringify(there.dump()).includes(signing_secret));
  for (const word of ['show', 'enable', 'disable', 'delete', 'ping', 'deliveries']) {
    const refusal = await there.refused(webhook(word, id, ...(word === 'delete' ? ['--yes'] : [])));
    t.match(refusal, {
      exitCode: 1,
      message: /there is no webhook 'whk_\w+': 'davit admin webhook list' shows all/,
    });
  }
});

t.test('invalid webhook commands are refused and change nothing', async (t) => {
  const there = await file(t);
  const { id } = await register(there, 'https://twin.test/');
  await register(there, 'https://twin.test/');
  const cases: [words: string[], exitCode: number, message: RegExp][] = [
    [['show', 'https://twin.test/'], 1, /several webhooks have this URL: use the id/],
    [['show', 'https://other.test/'], 1, /there is no webhook 'https:\/\/other\.test\/'/],
    [['show'], 2, /missing required argument 'webhook'/],
    [
      ['deliveries', id, '--status', 'exhuasted'],
      2,
      /there is no status 'exhuasted': did you mean exhausted\?/,
    ],
    [
      ['deliveries', id, '--event-type', 'x'],
      2,
      /there is no event type 'x': choose one of deployment\.succeeded/,
    ],
    [['replay', id], 2, /required option '--since <moment>' not specified/],
    [['replay', id, '--since', 'yesterday'], 2, /--since must be a moment such as 2026-01-31T12:00:00Z/],
    [['replay', id, '--since', '2026-02-30T12:00:00Z'], 2, /--since must be a moment/],
    [['replay', id, '--since', '1h', '--until', '2h'], 2, /--until must not be before --since, /],
    [
      ['replay', id, '--since', '2026-01-31T12:00:00.0005Z', '--until', '2026-01-31T12:00:00.0005Z'],
      2,
      /--until must not be before --since, once --since is\s+rounded up to a millisecond and --until down\s/,
    ],
    [['replay', id, '--since', '2099-01-01T00:00:00Z'], 2, /^error: --since is in the future/],
    [
      ['replay', id, '--since', '2099-01-01T00:00:00Z', '--until', '2100-01-01T00:00:00Z'],
      2,
      /--since is in the future/,
    ],
    [['replay', id, '--since', '1h', '--status', 'lost'], 2, /there is no status 'lost'/],
    [['ping', id, '--webhook-allow-cidr', 'everywhere'], 2, /--webhook-allow-cidr/],
    [
      ['ping', id, '--webhook-ca-file', 'missing.pem'],
      1,
      /--webhook-ca-file: \/.*\/missing\.pem cannot be read \(ENOENT\)/,
    ],
  ];
  await Promise.all(
    cases.map(async ([words, exitCode, message]) => {
      t.match(await there.refused(webhook(...words)), { exitCode, message }, words.join(' '));
    }),
  );
  await there.davit(['admin', 'key', 'revoke', 'ci', '--yes']);
  t.match(await there.refused(webhook('enable', id)), {
    exitCode: 1,
    message: /key that registered .* is revoked/,
  });
  t.match(await there.refused(webhook('replay', id, '--since', '24h')), {
    exitCode: 1,
    message: /key that registered .* is revoked/,
  });
  t.match(await there.refused(webhook('ping', id)), {
    exitCode: 1,
    message: /key that registered .* is revoked/,
  });
  const { stdout: help } = await there.davit(webhook('ping', '--help'));
  t.match(help.replaceAll(/\s+/g, ' '), /disabled webhook is sent it too, unless its key is revoked\./);
});

t.test('ping sends a signed event from the command itself and prints the answer', async (t) => {
  const there = await file(t);
  const receiver = await startReceiver(t, { answers: [status(200, { body: 'pong' })] });
  const { id, signing_secret } = await register(there, receiver.url);
  const before = there.dump();
  const pinged = await there.davit(webhook('ping', id, ...OPENED));
  t.match(pinged, {
    stdout: /^answer +200\ntook +\d+m?s\naddress +127\.0\.0\.1\nbody +pong\n$/,
    stderr: '',
    exitCode: 0,
  });
  const { body, headers } = await receiver.next();
  const event = new StandardWebhook(signing_secret).verify(
    body.toString(),
    headers as Record<string, string>,
  );
  t.match(event, { type: 'ping', data: { webhook_id: id } });

  await there.davit(webhook('disable', id));
  const { stdout } = await there.davit(webhook('ping', id, '--json'), {
    env: { DAVIT_WEBHOOK_ALLOW_CIDR: '127.0.0.0/8', DAVIT_WEBHOOK_ALLOW_HTTP: '1' },
  });
  const attempt: Attempt = JSON.parse(stdout);
  t.match(attempt, { number: 1, status_code: 200, error: null, trigger: 'ping' }, 'a disabled webhook, too');
  t.equal(receiver.requests.length, 2);
  t.match(there.dump()['attempts'], before['attempts'], 'a ping is not stored');
});

t.test('a ping without a 2xx answer exits with 1 and names the cause', async (t) => {
  const there = await file(t);
  const receiver = await startReceiver(t, { answers: [status(503), silence()] });
  const { id } = await register(there, receiver.url);
  const cases: [options: string[], stdout: RegExp, stderr: RegExp][] = [
    [[], /^error +url_refused$/m, /--webhook-allow-http allows http:/],
    [['--webhook-allow-http'], /^error +address_refused$/m, /--webhook-allow-cidr allows others/],
    [OPENED, /^answer +503$/m, /must answer with 2xx/],
    [[...OPENED, '--webhook-timeout', '1s'], /^error +timeout$/m, /^no HTTP answer came from the receiver$/m],
  ];
  for (const [options, stdout, stderr] of cases) {
    t.match(await there.davit(webhook('ping', id, ...options)), { stdout, stderr, exitCode: 1 });
  }
  t.equal(receiver.requests.length, 2, 'the refused ones were never sent');
});

t.test('ping trusts a private certificate authority with --webhook-ca-file', async (t) => {
  const there = await file(t);
  const receiver = await startReceiver(t, { tls: 'localhost' });
  const { id } = await register(there, receiver.url.replace('127.0.0.1', 'localhost'));
  const ping = webhook('ping', id, '--webhook-allow-cidr', '127.0.0.0/8');
  t.match(await there.davit(ping), { stdout: /^error +tls: /m, exitCode: 1 });
  const caFile = join(import.meta.dirname, '../fixtures/tls/ca.pem');
  t.match(readFileSync(caFile, 'utf8'), /BEGIN CERTIFICATE/);
  t.match(await there.davit([...ping, '--webhook-ca-file', caFile]), {
    stdout: /^answer +200$/m,
    exitCode: 0,
  });
});

t.test('deliveries are listed newest first, with their outcome', async (t) => {
  const there = await file(t);
  const { id } = await register(there, 'https://one.test/', {
    events: ['deployment.created', 'deployment.canceled'],
  });
  t.match(await there.davit(webhook('deliveries', id)), {
    stdout: '',
    stderr: 'there are no such deliveries\n',
  });
  await deploy(there, 3);
  await inFile(there, async (store) => {
    for (const delivery of dueOf(store, id, realEffects.now(), 1)) {
      const attempt = { statusCode: null, error: 'connection_refused' };
      await store.writer.write(
        'outbox.settle',
        settlementOf(delivery, realEffects.now(), { kind: 'exhausted' }, attempt),
      );
    }
  });
  const all = await there.json<Delivery[]>(webhook('deliveries', id));
  t.strictSame(
    all.map((delivery) => [delivery.status, delivery.attempt_count]),
    [
      ['pending', 0],
      ['pending', 0],
      ['exhausted', 1],
    ],
  );
  for (const words of [
    ['--status', 'exhausted', id],
    [id, '--status', 'exhausted', '--status', 'delivered'],
    ['--event-type', 'deployment.created,deployment.failed', '--status', 'exhausted,delivered', id],
  ]) {
    const exhausted = await there.davit(webhook('deliveries', ...words));
    t.match(exhausted.stdout, /^ID +EVENT +STATUS +ATTEMPTS +LAST +CREATED$/m);
    t.match(exhausted.stdout, /^dlv_\w+ +deployment\.created +exhausted +1 +connection_refused +20\S+Z$/m);
    t.equal(exhausted.stdout.split('\n').length, 3);
  }
  const limited = await there.davit(webhook('deliveries', id, '--limit', '2'));
  t.equal(limited.stderr, 'only the latest 2 are shown: --limit shows more\n');
  t.strictSame(await there.json(webhook('deliveries', id, '--event-type', 'deployment.canceled')), []);
});

t.test('a replay sends the deliveries of the given time and status, and says how many', async (t) => {
  const there = await file(t);
  const { id } = await register(there, 'https://one.test/');
  await deploy(there, 2);
  const replay = (...options: string[]) => there.json<Replay>(webhook('replay', id, ...options));
  const all = await replay('--since', '2020-01-01T00:00:00.0005Z');
  t.match(all, { webhook_id: id, since: '2020-01-01T00:00:00.001Z', count: 2, status: null });
  t.match(await replay('--since', '1h', '--status', 'pending'), { count: 2, status: 'pending' });
  t.match(await replay('--since', '1h', '--status', 'held'), { count: 0 });
  t.match(await replay('--since', '2h', '--until', '1h'), { count: 0 });
  t.match(await replay('--since', '1h', '--until', '1h'), { count: 0 });
  const none = await there.davit(webhook('replay', id, '--since', '0', '--status', 'held'));
  t.match(none, { stdout: /^0 deliveries to webhook/, exitCode: 0 });
  t.equal(none.stderr, '', 'so nothing waits for a service');
  const { until } = await replay('--since', '1h', '--until', '2100-01-01T00:00:00Z', '--status', 'held');
  t.ok(Date.parse(until) <= realEffects.now(), 'deliveries from now on are sent anyway');
  t.equal(there.dump()['replays']?.length, 2, 'a replay of no deliveries is not stored');
  t.match(await there.davit(webhook('replay', id, '--since', '1h')), { stderr: /no service is running/ });
  await there.davit(webhook('disable', id));
  t.match(await there.davit(webhook('replay', id, '--since', '1h')), { stderr: /the webhook is disabled/ });
});

t.test('on a terminal the list fits 80 columns, and a status is coloured', needsTerminal, async (t) => {
  const there = await file(t);
  await register(there, 'https://one.test/');
  await deploy(there, 1);
  const { shown } = onTerminal(there, webhook('list'));
  t.match(shown, /\p{Cc}\[32menabled\p{Cc}\[39m/u);
  const lines = shown.replaceAll(/\p{Cc}\[\d+m/gu, '').split('\n');
  t.match(lines, [
    'ID                            URL                STATUS   WAITING  KEY  EVENTS',
    / ci {3}created$/,
    '',
  ]);
  t.ok(lines.every((line) => line.length <= 80));
});

t.test('where no room is for a shortened URL, each webhook is a block', needsTerminal, async (t) => {
  const there = await file(t);
  const url = `https://hooks.example.com/${'x'.repeat(100)}`;
  await register(there, url);
  const { shown } = onTerminal(there, webhook('list'));
  t.match(shown, /^ID {6}whk_\w+\nURL {5}https:\/\/hooks\.example\.com\/x{100}\nSTATUS {2}enabled\n/);
});

interface File extends Place {
  keyId: KeyId;
}

/** With a project and a key. */
async function file(t: Test): Promise<File> {
  const there = place(t);
  await there.davit(['admin', 'project', 'create', '--name', 'website', '--', '/bin/true']);
  const { id } = await there.json<{ id: KeyId }>([
    'admin',
    'key',
    'create',
    '--name',
    'ci',
    '--all-scopes',
    '--all-projects',
  ]);
  // Paused, so that a service has deliveries to make and nothing else to do.
  await there.davit(['admin', 'project', 'pause', 'website']);
  return { ...there, keyId: id };
}

function register(
  there: File,
  url: string,
  {
    description = null as string | null,
    events = ['deployment.created' as const] as WebhookWithSecret['events'],
  } = {},
): Promise<WebhookWithSecret> {
  return inFile(there, ({ writer }) =>
    writer.write('webhooks.create', { keyId: there.keyId, url, events, description }),
  );
}

function deploy(there: File, count: number): Promise<void> {
  return inFile(there, async ({ reads, writer }) => {
    const deployment = newDeployment(reads.projects.resolve('website').id);
    for (let made = 0; made < count; made++) await writer.write('deployments.create', deployment);
  });
}

/** As if the service had sent what is due to a webhook, and its receiver had answered with 500. */
async function failOnce(there: File, id: WebhookId): Promise<void> {
  await inFile(there, async (store) => {
    for (const delivery of dueOf(store, id, realEffects.now(), 1)) {
      const next = { kind: 'retry', atMs: realEffects.now() + 3_600_000 } as const;
      await store.writer.write('outbox.settle', settlementOf(delivery, realEffects.now(), next));
    }
  });
}

async function eventOf(receiver: Receiver): Promise<{ id: string; type: string }> {
  const { body } = await receiver.next();
  return JSON.parse(body.toString());
}
