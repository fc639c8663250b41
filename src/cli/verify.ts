import { type Command, InvalidArgumentError } from 'commander';
import {
  NO_MATCH,
  TOLERANCE_SECONDS,
  type Verification,
  type VerificationRefusal,
  verify,
} from '../deliver/sign.ts';
import { formatDuration, LONGEST_DURATION, parseDuration } from '../durations.ts';
import { option } from '../options.ts';
import { isSigningSecret } from '../secrets.ts';
import { type CommandContext, explain, jsonOption, Refusal, requiredOption } from './command.ts';
import { printJson } from './results.ts';

interface VerifyOptions {
  secret: string;
  header: string;
  /** Seconds. */
  tolerance: number;
  json?: boolean;
}

/** `davit verify`: the reference verifier of the Service-Signature header. Reads the body from stdin. */
export function defineVerify(command: Command, context: CommandContext): void {
  explain(
    command,
    'Checks that a delivery was signed with the secret, was not altered, and is not old. Reads the body from stdin, byte ' +
      'for byte as it was received. Prints ok and exits with 0, or says what is wrong and exits with 1.',
    [
      'DAVIT_SIGNING_SECRET=whsec_… davit verify --header "$SIGNATURE" < body',
      'davit verify --secret whsec_… --header t=1795248930,v1=78df… < body',
    ],
  )
    .addOption(
      requiredOption('--secret <secret>', 'the signing secret as it was shown').env('DAVIT_SIGNING_SECRET'),
    )
    .addOption(requiredOption('--header <header>', 'the Service-Signature header'))
    .addOption(
      option('--tolerance <seconds>', 'how far its time may differ from now, in seconds or as a duration')
        .argParser(parseTolerance)
        .default(TOLERANCE_SECONDS),
    )
    .addOption(jsonOption())
    .action((options: VerifyOptions) => verifyInput(options, context));
}

async function verifyInput(options: VerifyOptions, context: CommandContext): Promise<void> {
  const { terminal, effects } = context;
  if (terminal.inputIsTyped) terminal.note('reading the body from the terminal until ^D');
  const body = await terminal.readInput();
  const verification: Verification = {
    secret: options.secret,
    // It may have been copied together with its name, and with white space around it, which HTTP libraries trim.
    header: options.header.trim().replace(/^service-signature:\s*/i, ''),
    body,
    nowSeconds: Math.floor(effects.now() / 1_000),
    toleranceSeconds: options.tolerance,
  };
  const verified = verify(verification);
  const result = verified.ok ? verified : { ok: false, reason: explained(verified, verification, body) };
  if (options.json === true) printJson(context, result);
  else if (result.ok) terminal.print('ok');
  if (result.ok) return;
  if (options.json !== true) terminal.note(`error: ${result.reason}`);
  throw new Refusal(result.reason);
}

/** With what was probably copied wrong. */
function explained(
  { reason, ageSeconds }: VerificationRefusal,
  verification: Verification,
  body: Buffer,
): string {
  // No delivery is empty, but Node also reads nothing from a stdin that is closed or a directory.
  if (body.length === 0) return 'stdin is empty: give the body there, as in < body';
  if (ageSeconds !== undefined) {
    const distance = formatDuration(Math.abs(ageSeconds) * 1_000);
    return `the signature is right, but ${reason}: ${distance} ${ageSeconds > 0 ? 'before' : 'after'} now`;
  }
  if (/^(webhook-signature:\s*)?v1,/i.test(verification.header ?? '')) {
    return `${reason}: Service-Signature is meant, not webhook-signature`;
  }
  if (reason !== NO_MATCH) return reason;
  if (!isSigningSecret(verification.secret)) {
    return `${reason}: the secret is not as davit shows it, whsec_ and 44 characters`;
  }
  // As echo and editors append one, those of Windows CR LF.
  const withoutLineEnd = Buffer.from(body.toString('latin1').replace(/\r?\n$/, ''), 'latin1');
  return verify({ ...verification, body: withoutLineEnd, toleranceSeconds: Infinity }).ok
    ? `${reason}: but one does without the line end after the body`
    : reason;
}

function parseTolerance(text: string): number {
  const durationMs = parseDuration(/^\d+$/.test(text) ? `${text}s` : text);
  if (durationMs === undefined) {
    throw new InvalidArgumentError(
      `It must be a number of seconds, or a duration such as 5m, and at most ${LONGEST_DURATION}.`,
    );
  }
  return durationMs / 1_000;
}
