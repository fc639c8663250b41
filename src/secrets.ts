import { hash } from 'node:crypto';
import { crc32 } from 'node:zlib';
import { base62, randomBase62 } from './domain.ts';

type RandomBytes = (size: number) => Uint8Array;

const KEY_PREFIX = 'davit_';
/** 43 characters of 62 are 256 bits. */
const KEY_RANDOM_LENGTH = 43;
const KEY_CHECKSUM_LENGTH = 6;
const KEY_FORM = new RegExp(`^${KEY_PREFIX}[0-9A-Za-z]{${KEY_RANDOM_LENGTH + KEY_CHECKSUM_LENGTH}}$`);

/** A new API key secret. Its checksum lets secret scanners recognise a key without a request. */
export function newKeySecret(random: RandomBytes): string {
  const body = KEY_PREFIX + randomBase62(KEY_RANDOM_LENGTH, random);
  return body + checksum(body);
}

/** Whether `text` has the form and the checksum of a key. Saves a database lookup for mistyped keys. */
export function isKeySecret(text: string): boolean {
  if (!KEY_FORM.test(text)) return false;
  const body = text.slice(0, -KEY_CHECKSUM_LENGTH);
  return checksum(body) === text.slice(-KEY_CHECKSUM_LENGTH);
}

/** The SHA-256 of a key, as hex; only the hash is stored. Looking keys up by hash leaks nothing through timing. */
export function hashKeySecret(secret: string): string {
  return hash('sha256', secret, 'hex');
}

export const SIGNING_SECRET_FORM = /^whsec_[A-Za-z0-9+/]{43}=$/;

/** A new webhook signing secret, in the form of Standard Webhooks: `whsec_` and base64 of 32 bytes. */
export function newSigningSecret(random: RandomBytes): string {
  return `whsec_${Buffer.from(random(32)).toString('base64')}`;
}

/** Whether `text` has the form of a signing secret. */
export function isSigningSecret(text: string): boolean {
  return SIGNING_SECRET_FORM.test(text);
}

/** Takes out API keys, signing secrets, and the user and password of URLs. */
export function withoutSecrets(text: string): string {
  return text
    .replaceAll(/(davit_)[0-9A-Za-z]{20,}|(whsec_)[0-9A-Za-z+/]{20,}=*/g, '$1$2…')
    .replaceAll(/:\/\/[^\s/]+@/g, '://…@');
}

function checksum(body: string): string {
  return base62(crc32(body), KEY_CHECKSUM_LENGTH);
}
