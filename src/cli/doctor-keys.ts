import type { Key } from '../domain.ts';
import { DAY_MS, endsSoonFrom } from '../durations.ts';
import type { Reads } from '../store/store.ts';
import { ageMs, type Case } from './doctor-case.ts';
import { type Finding, note, orOk, problem } from './findings.ts';
import { nameOfKey } from './names.ts';

const KEY_EXPIRED_LATELY_MS = 14 * DAY_MS;

/** Those that end soon, or ended lately. */
export function checkKeys({ nowMs }: Case, reads: Reads): Finding[] {
  const keys = reads.keys.list().filter(({ revoked_at }) => revoked_at === null);
  const live = keys.filter(({ expires_at }) => ageMs(expires_at, nowMs) <= 0);
  const ending = live
    .filter((key) => expiresSoon(key, nowMs))
    .map((key) =>
      problem(
        'keys',
        `${nameOfKey(key)} expires at ${key.expires_at}`,
        'replace it before then: davit admin key create',
      ),
    );
  // A note, as that may be what was meant; but whoever is refused since may not know why.
  const ended = keys
    .filter((key) => !live.includes(key) && ageMs(key.expires_at, nowMs) < KEY_EXPIRED_LATELY_MS)
    .map((key) =>
      note(
        'keys',
        `${nameOfKey(key)} expired at ${key.expires_at}`,
        `replace it if somebody still needs it: davit admin key create; if not, davit admin key revoke ${key.id}`,
      ),
    );
  return orOk([...ending, ...ended], 'keys', `${live.length} of them, none expires soon`);
}

function expiresSoon({ created_at, expires_at }: Key, nowMs: number): boolean {
  return expires_at !== null && nowMs > endsSoonFrom(Date.parse(created_at), Date.parse(expires_at));
}
