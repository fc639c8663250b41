import { execFileSync, spawn } from 'node:child_process';
import {
  closeSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readFileSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { createServer, type Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { Readable } from 'node:stream';
import { text as textOf } from 'node:stream/consumers';
import { setTimeout as delay } from 'node:timers/promises';

/*
 * davit's main job on real input, with nothing but the executable: a git repository, a project that releases
 * from it, a key, a webhook, a deployment of a tag, its log as it comes, and the signed event.
 * `--once` ends after the event and cleans up; otherwise the service goes on in the background.
 */

const ROOT = join(import.meta.dirname, '..');
const DAVIT = join(ROOT, 'build/davit');
const ONCE = process.argv.includes('--once');
// --once leaves what another quickstart made, or makes meanwhile.
const FOLDER = ONCE ? mkdtempSync(join(ROOT, 'build/quickstart-')) : join(ROOT, 'build/quickstart');
const DATABASE = join(FOLDER, 'davit.db');
const REPOSITORY = join(FOLDER, 'hello.git');
const RELEASES = join(FOLDER, 'releases');
const RELEASE_SCRIPT = join(FOLDER, 'release.sh');
const SERVICE_LOG = join(FOLDER, 'davit.log');
const PROCESS_ID = join(FOLDER, 'davit.pid');
/** Far more than it takes; a quickstart that hangs then says so. */
const PATIENCE_MS = 60_000;

const watchdog = setTimeout(
  () => fail(`nothing happened for ${PATIENCE_MS / 1000} s; see ${SERVICE_LOG}`),
  PATIENCE_MS,
);
let serviceProcessId: number | undefined;

try {
  await main();
} catch (error) {
  fail(error instanceof Error ? error.message : String(error));
}

async function main(): Promise<void> {
  if (!ONCE) {
    stopEarlierOne();
    rmSync(FOLDER, { recursive: true, force: true });
  }
  mkdirSync(RELEASES, { recursive: true });

  heading('a git repository with two tags');
  makeRepository();
  say(`${REPOSITORY}: v1.0.0, v1.1.0`);

  heading('a project: what a deployment does is its command');
  makeReleaseScript();
  const project = admin('project', 'create', '--name', 'hello', '--dir', RELEASES, '--', RELEASE_SCRIPT);

  heading('a key with just the scopes that this takes');
  const scopes = ['deployments:write', 'deployments:read', 'logs:read', 'webhooks:write'];
  const key = admin(
    'key',
    'create',
    '--name',
    'quickstart',
    '--project',
    project.id,
    ...scopes.flatMap((scope) => ['--scope', scope]),
  );

  heading('the service');
  const url = await startService();
  say(`davit listening on ${url}`);

  heading('a webhook: who is told how it ended');
  const receiver = await startReceiver();
  const post = posting(url, String(key.secret));
  const webhook = await post('/v2/webhooks', {
    url: receiver.url,
    events: ['deployment.succeeded', 'deployment.failed'],
  });

  heading('a deployment of the tag v1.1.0');
  const deployment = await post(
    `/v2/projects/${project.id}/deployments`,
    { ref: 'v1.1.0' },
    { 'Idempotency-Key': crypto.randomUUID() },
  );

  heading('its log, as it comes');
  await followLog(url, String(key.secret), deployment.id);

  heading('the signed event, as the receiver got it');
  const event = await receiver.event;
  const signature = event.headers['service-signature'];
  say(`Service-Signature: ${signature}`);
  say(event.body);
  verify(String(webhook.signing_secret), signature, event.body);
  if (JSON.parse(event.body).type !== 'deployment.succeeded')
    throw new Error('the deployment did not succeed');
  say(`released: ${readFileSync(join(RELEASES, 'current/message.txt'), 'utf8').trim()}`);

  receiver.server.close();
  clearTimeout(watchdog);
  if (ONCE) await cleanUp();
  else showWhatIsNext(url, String(key.secret), project.id, deployment.id);
}

/** A resource that a step created, as the API shows it. */
interface Resource extends Record<string, unknown> {
  id: string;
}

function makeRepository(): void {
  const work = join(FOLDER, 'hello');
  const git = (...words: string[]) => {
    const identity = [
      '-c',
      'user.name=davit',
      '-c',
      'user.email=davit@example.com',
      '-c',
      'init.defaultBranch=main',
    ];
    try {
      // No GIT_DIR, as a hook has it, and no configuration of the user, which may sign commits or run hooks.
      const env = { PATH: process.env['PATH'] };
      execFileSync('git', [...identity, ...words], {
        cwd: work,
        env,
        stdio: ['ignore', 'ignore', 'inherit'],
      });
    } catch (error) {
      const missing = error instanceof Error && 'code' in error && error.code === 'ENOENT';
      throw new Error(missing ? 'git is not on the PATH: install it' : 'git failed, see above');
    }
  };
  mkdirSync(work);
  git('init', '--quiet');
  for (const [tag, message] of [
    ['v1.0.0', 'hello'],
    ['v1.1.0', 'hello, world'],
  ] as const) {
    writeFileSync(join(work, 'message.txt'), `${message}\n`);
    git('add', '.');
    git('commit', '--quiet', '--message', message);
    git('tag', tag);
  }
  git('clone', '--quiet', '--bare', work, REPOSITORY);
}

/** The ref is an environment variable, quoted like any other: it is never part of a command line. */
function makeReleaseScript(): void {
  writeFileSync(
    RELEASE_SCRIPT,
    `#!/bin/sh
set -eu
echo "checking out $DEPLOY_REF of $DEPLOY_PROJECT_NAME"
git clone --quiet --no-checkout ../hello.git "$DEPLOY_ID"
git -C "$DEPLOY_ID" checkout --quiet --detach "$DEPLOY_REF"
echo "releasing $(git -C "$DEPLOY_ID" rev-parse --short HEAD)"
ln -sfn "$DEPLOY_ID" current
echo "commit=$(git -C "$DEPLOY_ID" rev-parse HEAD)" >>"$DEPLOY_OUTPUT"
echo "done: $(cat current/message.txt)"
`,
    { mode: 0o755 },
  );
}

function admin(...words: string[]): Resource {
  shown(['davit', 'admin', ...words]);
  const output = execFileSync(
    DAVIT,
    ['admin', '--db', DATABASE, ...words.slice(0, 2), '--json', ...words.slice(2)],
    {
      encoding: 'utf8',
    },
  );
  const made = JSON.parse(output) as Resource;
  say(made.id);
  return made;
}

async function startService(): Promise<string> {
  const words = [
    'serve',
    '--db',
    DATABASE,
    '--listen',
    '127.0.0.1:0',
    '--webhook-allow-http',
    '--webhook-allow-cidr',
    '127.0.0.0/8',
  ];
  shown(['davit', ...words]);
  const log = openSync(SERVICE_LOG, 'a');
  const ready = join(FOLDER, 'davit.out');
  const output = openSync(ready, 'w');
  // Files, not pipes: the service outlives this script.
  const service = spawn(DAVIT, words, { detached: true, stdio: ['ignore', output, log] });
  closeSync(log);
  closeSync(output);
  serviceProcessId = service.pid;
  writeFileSync(PROCESS_ID, String(service.pid));
  let ended = false;
  service.once('exit', () => {
    ended = true;
  });
  service.unref();
  for (;;) {
    const url = /^davit listening on (\S+)$/m.exec(readFileSync(ready, 'utf8'))?.[1];
    if (url !== undefined) return url;
    if (ended) throw new Error(`davit did not start:\n${readFileSync(SERVICE_LOG, 'utf8')}`);
    await delay(20);
  }
}

interface Received {
  headers: Record<string, string>;
  body: string;
}

/** `event`: the first that it receives. */
async function startReceiver(): Promise<{ url: string; server: Server; event: Promise<Received> }> {
  const first = Promise.withResolvers<Received>();
  const server = createServer(async (request, response) => {
    const body = await textOf(request);
    response.writeHead(204).end();
    first.resolve({ headers: request.headers as Record<string, string>, body });
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as AddressInfo;
  return { url: `http://127.0.0.1:${port}/events`, server, event: first.promise };
}

function posting(url: string, key: string) {
  return async (path: string, body: unknown, headers: Record<string, string> = {}): Promise<Resource> => {
    const all = { Authorization: `Bearer ${key}`, 'Content-Type': 'application/json', ...headers };
    say(`$ ${curl('POST', `${url}${path}`, body, headers)}`);
    const response = await fetch(`${url}${path}`, {
      method: 'POST',
      headers: all,
      body: JSON.stringify(body),
    });
    const text = await response.text();
    say(text.replace(/whsec_[^"]+/, 'whsec_…'));
    if (!response.ok) throw new Error(`POST ${path} answered ${response.status}`);
    return JSON.parse(text) as Resource;
  };
}

/** Server-sent events: `data:` lines until the `end` event. */
async function followLog(url: string, key: string, deploymentId: string): Promise<void> {
  const response = await fetch(`${url}/v2/deployments/${deploymentId}/logs`, {
    headers: { Authorization: `Bearer ${key}`, Accept: 'text/event-stream' },
  });
  if (!response.ok || response.body === null) throw new Error(`the log answered ${response.status}`);
  let event = 'log';
  let data: string[] = [];
  for await (const line of createInterface({ input: Readable.fromWeb(response.body) })) {
    if (line.startsWith('event: ')) event = line.slice('event: '.length);
    else if (line.startsWith('data: ')) data.push(line.slice('data: '.length));
    else if (line === '') {
      show(event, data);
      event = 'log';
      data = [];
    }
  }
}

function show(event: string, data: string[]): void {
  if (event === 'end') {
    say(`ended: ${data.join('')}`);
    return;
  }
  // The text usually ends with a line break, which shows as an empty last line.
  for (const line of data.at(-1) === '' ? data.slice(0, -1) : data) say(`| ${line}`);
}

function verify(secret: string, header: string | undefined, body: string): void {
  const words = ['verify', '--header', header ?? ''];
  shown(['davit', ...words]);
  const answer = execFileSync(DAVIT, words, {
    input: body,
    env: { DAVIT_SIGNING_SECRET: secret },
    encoding: 'utf8',
  });
  say(answer.trim());
}

function showWhatIsNext(url: string, key: string, projectId: string, deploymentId: string): void {
  heading('running: try');
  say(`export DAVIT_KEY=${key}`);
  say(
    curl(
      'POST',
      `${url}/v2/projects/${projectId}/deployments`,
      { ref: 'v1.0.0' },
      { 'Idempotency-Key': 'try-1' },
    ),
  );
  say(curl('GET', `${url}/v2/deployments/${deploymentId}`));
  say(curl('GET', `${url}/v2/deployments/${deploymentId}/logs`));
  say('');
  say(`project ${projectId}; file ${DATABASE}; log ${SERVICE_LOG}`);
  say(`stop it with: kill ${serviceProcessId}`);
}

function curl(
  method: 'GET' | 'POST',
  url: string,
  body?: unknown,
  headers: Record<string, string> = {},
): string {
  const words = [
    'curl',
    ...(method === 'GET' ? [] : ['-X', method]),
    url,
    '-H',
    '"Authorization: Bearer $DAVIT_KEY"',
  ];
  const all = body === undefined ? headers : { 'Content-Type': 'application/json', ...headers };
  for (const [name, value] of Object.entries(all)) words.push('-H', `'${name}: ${value}'`);
  if (body !== undefined) words.push('-d', `'${JSON.stringify(body)}'`);
  return words.join(' ');
}

/** Stops the service that an earlier run left in the background, and no other process. */
function stopEarlierOne(): void {
  if (!existsSync(PROCESS_ID)) return;
  const processId = Number(readFileSync(PROCESS_ID, 'utf8'));
  try {
    if (!readFileSync(`/proc/${processId}/cmdline`, 'utf8').includes(DATABASE)) return;
    process.kill(processId, 'SIGTERM');
    say(
      `stopped the service of the earlier quickstart, process ${processId}, to begin anew without its file`,
    );
  } catch {
    // it is gone
  }
}

async function cleanUp(): Promise<void> {
  if (serviceProcessId !== undefined) process.kill(serviceProcessId, 'SIGTERM');
  while (serviceProcessId !== undefined && existsSync(`/proc/${serviceProcessId}`)) {
    await delay(20);
  }
  rmSync(FOLDER, { recursive: true, force: true });
  heading('everything worked, and is cleaned up');
}

function fail(reason: string): never {
  process.stderr.write(`\nquickstart: ${reason}\n`);
  if (serviceProcessId !== undefined) {
    try {
      process.kill(serviceProcessId, 'SIGTERM');
    } catch {
      // it is gone
    }
  }
  process.exit(1);
}

function heading(text: string): void {
  process.stdout.write(`\n${process.stdout.isTTY ? `\x1b[1m${text}\x1b[0m` : text}\n`);
}

function shown(words: string[]): void {
  say(`$ ${words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word}'`)).join(' ')}`);
}

function say(line: string): void {
  process.stdout.write(`  ${line}\n`);
}
