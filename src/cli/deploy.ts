import { type Command, InvalidArgumentError } from 'commander';
import { version } from '../assets.ts';
import {
  type Deployment,
  type DeploymentId,
  type ProjectId,
  parseId,
  type Ref,
  randomBase62,
} from '../domain.ts';
import { AppError } from '../errors.ts';
import { readOptionFile } from '../option-files.ts';
import { durationMsOrNone, option } from '../options.ts';
import { readAuthorities } from '../pem.ts';
import { printable } from '../printable.ts';
import type { ApiClient } from './api-client.ts';
import { type CommandContext, explain, misused, Refusal, requiredOption, stayAlive } from './command.ts';
import type { Outcome } from './deploy-follow.ts';
import { handleInterruption, type Interruption } from './deploy-interrupt.ts';
import { deploymentLine, statusText } from './deployment-status.ts';
import { createLogOutput } from './log-output.ts';
import { tookText } from './moments.ts';
import { refOf } from './names.ts';
import { GaveUp } from './patience.ts';
import { printJson } from './results.ts';

interface DeployOptions {
  url: URL;
  keyFile?: string;
  wait?: boolean;
  idempotencyKey?: string;
  retryFor: number;
  cancelOnInterrupt?: boolean;
  caFile?: string;
  json?: boolean;
}

/** `davit deploy`: a client of the API, for the jobs of a CI. */
export function defineDeploy(command: Command, context: CommandContext): void {
  explain(
    command,
    'Requests a deployment from a davit, here or elsewhere, and with --wait follows its log until it has ended. The key ' +
      'comes from $DAVIT_KEY or --key-file; it needs the scope deployments:write, and for --wait deployments:read and ' +
      'logs:read; with projects:read, it can tell that the project is paused. A request that is lost is repeated, and ' +
      'still makes only one deployment.\n\n' +
      'Exit code 0: it succeeded (without --wait: it was accepted). 1: it failed, was canceled or refused, or the ' +
      'service could not be reached in time. 2: wrong usage. 129, 130, 143: a signal. With --wait, ^C asks whether to cancel ' +
      'the deployment; a second ^C leaves at once, and the deployment goes on. HTTPS_PROXY, HTTP_PROXY and NO_PROXY are ' +
      'used too; NODE_EXTRA_CA_CERTS adds an authority, and NODE_TLS_REJECT_UNAUTHORIZED has no effect.',
    [
      'DAVIT_URL=https://deploy.example.com davit deploy prj_… v1.2.3 --wait',
      'davit deploy prj_… "$SHA" --wait --idempotency-key "$CI_JOB_ID"',
      'ID=$(davit deploy prj_… main --key-file /run/secrets/davit)',
    ],
  )
    // Without --db: it uses no file of davit's.
    .configureHelp({ ...command.configureHelp(), visibleGlobalOptions: () => [] })
    .argument('<project_id>', 'what to deploy', projectIdOf)
    .argument('<ref>', 'a branch, a tag or a commit of it', refOf)
    .addOption(requiredOption('--url <url>', 'where the service is').argParser(urlOf))
    .addOption(option('--key-file <file>', 'read the key from this file, in place of $DAVIT_KEY'))
    .addOption(option('--wait', 'follow the log until the deployment has ended'))
    .addOption(
      option('--idempotency-key <text>', 'the same key again makes no second deployment').argParser(
        idempotencyKeyOf,
      ),
    )
    .addOption(
      option('--retry-for <duration>', 'how long to retry when the service cannot be reached, or 0')
        .argParser(durationMsOrNone)
        .default(durationMsOrNone('2m'), '2m'),
    )
    .addOption(
      option(
        '--cancel-on-interrupt',
        // Node resets at its start what nohup has made it ignore.
        'cancel the deployment at ^C, SIGTERM or SIGHUP, without asking; setsid or systemd-run keeps SIGHUP away, nohup does not',
      ),
    )
    .addOption(option('--ca-file <file>', 'trust the certificates in this file (PEM) too'))
    .addOption(
      option('--json', 'print the deployment as JSON; with --wait once it has ended, in place of the log'),
    )
    .action((projectId: ProjectId, ref: Ref, options: DeployOptions) =>
      deploy(command, projectId, ref, options, context),
    );
}

async function deploy(
  command: Command,
  projectId: ProjectId,
  ref: Ref,
  options: DeployOptions,
  context: CommandContext,
): Promise<void> {
  const key = keyOf(command, options, context);
  // Of both files, an empty name counts as none.
  const caPem = options.caFile ? readAuthorities('--ca-file', options.caFile) : null;
  const idempotencyKey =
    options.idempotencyKey ?? `davit-deploy-${randomBase62(22, context.effects.randomBytes)}`;
  warnOfPlainText(options.url, context);
  const { createApiClient, TIMEOUTS } = await import('./api-client.ts');
  using _ = stayAlive();
  const { url: baseUrl, retryFor: retryForMs } = options;
  const api = createApiClient({ baseUrl, key, caPem, retryForMs, version, timeouts: TIMEOUTS }, context);
  const interruption = handleInterruption(api, idempotencyKey, options, context);
  try {
    const created = await api.call({
      method: 'POST',
      path: `/v2/projects/${projectId}/deployments`,
      headers: { 'Idempotency-Key': idempotencyKey },
      body: { ref },
      onTry: interruption.tried,
    });
    if (!created.ok) {
      // davit does not say of what: the id is wrong, or the URL leads to another davit, or below it.
      const what = created.isDavits && created.status === 404 ? `${projectId} at ${baseUrl}: ` : '';
      throw created.mayBeDone
        ? new AppError('conflict', `${created.message}; ${interruption.whatIsLeft()}`)
        : new AppError('conflict', `not deployed: ${what}${created.message}`);
    }
    const { body, replayed } = created;
    interruption.created(body.id);
    if (replayed === true) context.terminal.note(replayText(body));
    else if (options.json !== true) context.terminal.note(deploymentLine(body));
    if (options.wait === true || interruption.isCanceling())
      await awaitOutcome(body, api, interruption, options, context);
    else if (options.json === true) printJson(context, body);
    else context.terminal.print(body.id);
  } catch (error) {
    await interruption.settled();
    const isExpected = error instanceof AppError || error instanceof Refusal;
    if (interruption.mayBeCreated() && error instanceof GaveUp)
      throw new GaveUp(`${error.message}; ${interruption.whatIsLeft()}`, { cause: error });
    if (interruption.mayBeCreated() && !isExpected) context.terminal.note(interruption.whatIsLeft());
    throw error;
  } finally {
    await api.close();
  }
}

/** Returns if the deployment succeeds, and throws otherwise. */
async function awaitOutcome(
  created: Deployment,
  api: ApiClient,
  interruption: Interruption,
  options: DeployOptions,
  context: CommandContext,
): Promise<void> {
  const { terminal, exit } = context;
  const { id } = created;
  const outcome = await followToEnd(id, api, options, interruption, context);
  if (outcome.kind === 'refused') {
    await interruption.settled();
    // 404: it was removed, or the key does not see it any more.
    const left = outcome.refusal.status === 404 ? '' : `; ${interruption.whatIsLeft()}`;
    throw new AppError('conflict', `${id} cannot be followed: ${outcome.refusal.message}${left}`);
  }
  const { status, deployment } = outcome;
  interruption.ended(status);
  await interruption.answered();
  if (options.json === true) {
    printJson(context, deployment);
  } else {
    const { duration_ms, message } = deployment ?? { duration_ms: null, message: null };
    const took = duration_ms === null ? '' : ` in ${tookText(duration_ms)}`;
    const by = deployment?.superseded_by ? ` by ${deployment.superseded_by}` : '';
    const how = deployment === null ? status : `${statusText(deployment)}${by}`;
    terminal.note(deploymentLine(created, `${how}${took}`));
    if (message !== null) terminal.note(printable(message));
  }
  // A cancellation that is still unanswered would keep the process alive, though nothing depends on it.
  if (interruption.isOpen()) {
    terminal.note(interruption.whatIsLeft());
    exit(status === 'succeeded' ? 0 : 1);
  }
  if (status !== 'succeeded') throw new Refusal(`the deployment ${status}`);
}

/** Resolves to how the deployment ended. Writes the log meanwhile, but for `--json`. */
async function followToEnd(
  id: DeploymentId,
  api: ApiClient,
  { json = false }: DeployOptions,
  interruption: Interruption,
  { terminal, effects }: CommandContext,
): Promise<Outcome> {
  const { awaitEnd, followLog } = await import('./deploy-follow.ts');
  if (!json) {
    const log = createLogOutput(terminal);
    const { answered, ended } = interruption;
    const outcome = await followLog(id, api, log, answered, terminal.note, ended).finally(log.end);
    if (outcome.kind === 'ended' || outcome.refusal.status !== 403) return outcome;
    terminal.note('the key may not read logs (logs:read): waiting for the end without them');
  }
  return await awaitEnd(id, api, effects, terminal.note);
}

/** Never from the command line, which every user of the machine can read. */
function keyOf(command: Command, { keyFile }: DeployOptions, { environment }: CommandContext): string {
  const text = keyFile ? readOptionFile('--key-file', keyFile).toString() : environment['DAVIT_KEY'];
  const key = text?.trim();
  if (key === undefined || key === '')
    return misused(command, 'there is no key: set DAVIT_KEY or say --key-file');
  // Quotes are a part of it where nothing takes them away, as in the env file of a container.
  if (!/^[\x21-\x7e]+$/.test(key) || /^["']/.test(key))
    return misused(command, 'the key must be the single line that davit printed, without quotes');
  return key;
}

function warnOfPlainText({ protocol, hostname }: URL, { terminal }: CommandContext): void {
  const isHere = /^(?:localhost|\[::1\]|127(?:\.\d+){3})$/.test(hostname);
  if (protocol === 'https:' || isHere) return;
  terminal.note(`warning: the key goes to ${hostname} in clear text: use https where others can listen`);
}

/** The status in the answer is that of the first time. */
function replayText({ id, created_at }: Deployment): string {
  return printable(
    `this idempotency key was used before: deployment ${id} of ${created_at}; nothing new was deployed`,
  );
}

function projectIdOf(text: string): ProjectId {
  const id = parseId('prj', text);
  if (id === undefined)
    throw new InvalidArgumentError(
      "It must be one such as prj_…, which 'davit admin project list' shows where the service is.",
    );
  return id;
}

function urlOf(text: string): URL {
  const url = URL.parse(text);
  // An empty query or fragment is only in `href`.
  if (url === null || !/^https?:$/.test(url.protocol) || /[?#]/.test(url.href)) {
    throw new InvalidArgumentError('It must be a URL such as https://deploy.example.com.');
  }
  if (url.username !== '' || url.password !== '') {
    throw new InvalidArgumentError('It must not hold a user or a password: only the key is used.');
  }
  if (/\/v2\/*$/.test(url.pathname)) {
    throw new InvalidArgumentError('It must not end with /v2, which is added to it.');
  }
  return url;
}

function idempotencyKeyOf(text: string): string {
  if (!/^[\x21-\x7e]{1,255}$/.test(text)) {
    throw new InvalidArgumentError('It must be 1 to 255 visible ASCII characters.');
  }
  return text;
}
