import type { Command } from 'commander';
import { someSettings } from '../config.ts';
import type { Attempt } from '../domain.ts';
import { AppError } from '../errors.ts';
import { readAuthorities } from '../pem.ts';
import type { Store } from '../store/store.ts';
import { type CommandContext, explain, jsonOption, Refusal } from './command.ts';
import { withStore } from './database-file.ts';
import { tookText } from './moments.ts';
import { nameOfWebhook, resolveWebhook, WEBHOOK_ARGUMENT } from './names.ts';
import { printJson } from './results.ts';
import { fields } from './table.ts';

/** The same options as those of `davit serve` for deliveries. */
const sending = someSettings('webhookTimeoutMs', 'webhookAllowCidrs', 'webhookAllowHttp', 'webhookCaFile');

type PingOptions = Record<string, unknown> & { json?: boolean };

/** `davit admin webhook ping`. */
export function definePing(command: Command, context: CommandContext): void {
  explain(
    command.summary('send it a signed test event now'),
    'Sends a single event of type ping, signed like a delivery, directly from this process, and shows the answer. ' +
      'Nothing is stored. A disabled webhook is sent it too, unless its key is revoked. Exit code 1 unless the receiver ' +
      'answers with 2xx. Addresses are checked as davit serve does, which also refuses those that it listens on itself: ' +
      'give the same options as there.',
    ['davit admin webhook ping whk_…', 'davit admin webhook ping whk_… --webhook-allow-cidr 10.0.0.0/8'],
  )
    .argument(...WEBHOOK_ARGUMENT)
    .addOption(jsonOption())
    .action((idOrUrl: string, options: PingOptions) => ping(command, idOrUrl, options, context));
  for (const setting of sending.options()) command.addOption(setting);
}

async function ping(
  command: Command,
  idOrUrl: string,
  options: PingOptions,
  context: CommandContext,
): Promise<void> {
  const attempt = await withStore(command, context, 'refuse', (store) =>
    attemptPing(store, idOrUrl, options, context),
  );
  const { status_code, error } = attempt;
  if (options.json === true) printJson(context, attempt);
  else context.terminal.print(attemptText(attempt, context));
  if (status_code !== null && status_code >= 200 && status_code <= 299) return;
  context.terminal.note(failureText(error));
  throw new Refusal('the ping failed');
}

async function attemptPing(
  store: Store,
  idOrUrl: string,
  options: PingOptions,
  { effects }: CommandContext,
): Promise<Attempt> {
  const webhook = resolveWebhook(store, idOrUrl, effects.now());
  const { webhookTimeoutMs, webhookAllowCidrs, webhookAllowHttp, webhookCaFile } =
    sending.valuesFrom(options);
  const caPem = webhookCaFile === null ? null : readAuthorities('--webhook-ca-file', webhookCaFile);
  // Imported only here, as they load TLS.
  const [{ createSender }, { createPinger }] = await Promise.all([
    import('../deliver/send.ts'),
    import('../deliver/ping.ts'),
  ]);
  const sender = createSender(
    {
      timeoutMs: webhookTimeoutMs,
      allowHttp: webhookAllowHttp,
      allowedCidrs: webhookAllowCidrs,
      caPem,
    },
    effects,
  );
  try {
    const result = await createPinger(store.reads, sender, effects).ping(webhook.id);
    if (result.kind === 'attempted') return result.attempt;
    store.reads.webhooks.refuseOfRevokedKey(webhook.id);
    throw new AppError('not_found', `${nameOfWebhook(webhook)} was deleted just now`);
  } finally {
    sender.close();
  }
}

function attemptText(attempt: Attempt, { terminal }: CommandContext): string {
  const { status_code, error, duration_ms, remote_address, response_body } = attempt;
  return fields(terminal, [
    ['answer', status_code === null ? null : String(status_code)],
    ['error', error],
    ['took', tookText(duration_ms)],
    ['address', remote_address],
    ['body', response_body === '' ? null : response_body],
  ]);
}

function failureText(error: string | null): string {
  switch (error) {
    case null:
      return 'the receiver must answer with 2xx';
    case 'address_refused':
      return 'davit sends to public addresses only: --webhook-allow-cidr allows others, here and for davit serve';
    case 'url_refused':
      return 'davit sends to https:// only: --webhook-allow-http allows http://, here and for davit serve';
    default:
      return 'no HTTP answer came from the receiver';
  }
}
