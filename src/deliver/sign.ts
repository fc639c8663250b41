import { timingSafeEqual } from 'node:crypto';
import { type HmacKey, hmacKey, hmacSha256 } from './hmac.ts';

interface Signing {
  eventId: string;
  /** The webhook's live secrets: one, or more while a rotation overlaps. The array must not be modified. */
  secrets: readonly string[];
  /** When it is sent, in whole seconds since 1970. */
  atSeconds: number;
  /** Exactly the bytes that are sent. */
  body: string | Uint8Array;
}

/** The headers that authenticate a delivery: `Service-Signature`, and those of Standard Webhooks. */
export function signedHeaders({ eventId, secrets, atSeconds, body }: Signing): Record<string, string> {
  return {
    'Service-Signature': serviceSignature(secrets, atSeconds, body),
    'webhook-id': eventId,
    'webhook-timestamp': String(atSeconds),
    'webhook-signature': standardSignature(secrets, eventId, atSeconds, body),
  };
}

/** `t=…,v1=…` with one `v1` for each secret, keyed with the whole secret as it is shown, including `whsec_`. */
export function serviceSignature(
  secrets: readonly string[],
  atSeconds: number,
  body: string | Uint8Array,
): string {
  const digests = keysOf(secrets).map(
    ({ service }) => `v1=${hmacSha256(service, `${atSeconds}.`, body, 'hex')}`,
  );
  return [`t=${atSeconds}`, ...digests].join(',');
}

/** Standard Webhooks 1.0.0: `v1,…` for each secret, separated by spaces, keyed with the base64-decoded secret. */
export function standardSignature(
  secrets: readonly string[],
  eventId: string,
  atSeconds: number,
  body: string | Uint8Array,
): string {
  return keysOf(secrets)
    .map(({ standard }) => `v1,${hmacSha256(standard, `${eventId}.${atSeconds}.`, body, 'base64')}`)
    .join(' ');
}

interface SigningKeys {
  service: HmacKey;
  standard: HmacKey;
}

/** Prepared keys, by the array of their secrets: store/recipients.ts caches it, and passes the same one each time. */
const keys = new WeakMap<readonly string[], readonly SigningKeys[]>();

/** Cached, as preparing the keys takes longer than signing with them. */
function keysOf(secrets: readonly string[]): readonly SigningKeys[] {
  const known = keys.get(secrets);
  if (known !== undefined) return known;
  const made = secrets.map((secret) => ({
    service: hmacKey(Buffer.from(secret)),
    standard: hmacKey(Buffer.from(secret.replace(/^whsec_/, ''), 'base64')),
  }));
  keys.set(secrets, made);
  return made;
}

export interface Verification {
  /** As it was shown when the webhook was registered, or the secret was rotated. */
  secret: string;
  /** The Service-Signature header; undefined if the request had none. */
  header: string | undefined;
  /** The body as it was received: before any parsing, not parsed and serialised again. */
  body: string | Uint8Array;
  nowSeconds: number;
  toleranceSeconds?: number;
}

type VerificationResult = { ok: true } | VerificationRefusal;

/** `ageSeconds`: only of a signature that is right and outside the tolerance; negative if it was made after now. */
export type VerificationRefusal = { ok: false; reason: string; ageSeconds?: number };

/** How far the time of a delivery may differ from now: the default of the reference verifier. */
export const TOLERANCE_SECONDS = 300;

/** Why a delivery is refused whose secret or body is another one than that signed. */
export const NO_MATCH = 'no signature matches the secret and the body';

/** A real header with a dozen secrets takes less than a fifth of this. */
const HEADER_MAX_LENGTH = 4096;

/**
 * The reference verifier: whether a delivery was signed with the secret, was not altered, and was sent within the
 * tolerance before or after now. Never throws, whatever the header is; compares in constant time. A receiver must also
 * drop event ids that it has seen: the same delivery may arrive again, within the tolerance or through retries.
 */
export function verify({
  secret,
  header,
  body,
  nowSeconds,
  toleranceSeconds = TOLERANCE_SECONDS,
}: Verification): VerificationResult {
  // Anybody can sign with an empty secret, which is what an unset variable gives.
  if (secret === '') return { ok: false, reason: 'the secret is empty' };
  const signature = parseHeader(header);
  if (!signature.ok) return signature;
  const key = hmacKey(Buffer.from(secret));
  const expected = Buffer.from(hmacSha256(key, `${signature.atSeconds}.`, body, 'hex'), 'hex');
  let matches = false;
  for (const candidate of signature.digests) {
    matches = timingSafeEqual(candidate, expected) || matches;
  }
  if (!matches) return { ok: false, reason: NO_MATCH };
  const ageSeconds = nowSeconds - signature.atSeconds;
  // Written so that NaN is refused.
  if (!(Math.abs(ageSeconds) <= toleranceSeconds)) {
    return { ok: false, reason: 'the timestamp is outside the tolerance', ageSeconds };
  }
  return { ok: true };
}

type HeaderResult = { ok: true; atSeconds: number; digests: Buffer[] } | { ok: false; reason: string };

/**
 * Parses `t=<seconds>`, once, and at least one `v1=<64 hex digits>`, in any order; ignores whatever else there is, as
 * the README's verifiers do.
 */
function parseHeader(header: string | undefined): HeaderResult {
  const refuse = (reason: string): HeaderResult => ({ ok: false, reason });
  if (header === undefined || header === '') return refuse('the header is missing');
  if (header.length > HEADER_MAX_LENGTH) return refuse('the header is too long');
  let atSeconds: number | undefined;
  const digests: Buffer[] = [];
  for (const element of header.split(',')) {
    const separator = element.indexOf('=');
    if (separator === -1) continue;
    const value = element.slice(separator + 1);
    switch (element.slice(0, separator)) {
      case 't':
        if (atSeconds !== undefined) return refuse('the header has more than one t');
        // No sign, leading zero or fraction: the digest is computed over the number, which must have one form only.
        if (!/^(0|[1-9]\d{0,14})$/.test(value)) return refuse('t is not a time in whole seconds');
        atSeconds = Number(value);
        break;
      case 'v1':
        if (/^[0-9a-f]{64}$/.test(value)) digests.push(Buffer.from(value, 'hex'));
        break;
    }
  }
  if (atSeconds === undefined) return refuse('the header has no t');
  if (digests.length === 0) return refuse('the header has no v1 of 64 hexadecimal digits');
  return { ok: true, atSeconds, digests };
}
