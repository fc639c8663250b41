import { copyFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import t, { type Test } from 'tap';
import type { ServeConfig } from '../../src/config.ts';
import { DAY_MS, HOUR_MS } from '../../src/durations.ts';
import { AppError } from '../../src/errors.ts';
import { certificatesOf } from '../../src/http/certificates.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { keptLog } from '../helpers/kept-log.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');
/** Of expired.pem. */
const VALID_FROM_MS = Date.UTC(2020, 0, 1);
const VALID_TO_MS = Date.UTC(2021, 0, 1);

const SOON = 'the certificate expires soon: renew it, then send SIGHUP';
const NOT_YET = 'the certificate is not valid yet, and clients refuse it: is the clock right?';
const EXPIRED = 'the certificate has expired, and clients refuse it: renew it, then send SIGHUP';

t.test('a certificate is warned of on each of its last 14 days, and once it has expired', async (t) => {
  const { certificates, effects, warnings } = inUse(t, VALID_TO_MS - 15.5 * DAY_MS);
  certificates.own();
  effects.advance(1.5 * DAY_MS);
  t.strictSame(warnings(), []);
  for (let day = 14; day > 0; day--) {
    effects.advance(HOUR_MS);
    t.strictSame(warnings(), [SOON], `${day} days before its end`);
    effects.advance(23 * HOUR_MS);
    t.strictSame(warnings(), []);
  }
  for (const day of ['first', 'second']) {
    effects.advance(HOUR_MS);
    t.strictSame(warnings(), [EXPIRED], `the ${day} day after`);
    effects.advance(23 * HOUR_MS);
    t.strictSame(warnings(), []);
  }
});

t.test('its end is told of at once, whatever the hour of the daily warning', async (t) => {
  const { certificates, effects, warnings } = inUse(t, VALID_TO_MS - 1.5 * DAY_MS);
  certificates.own();
  effects.advance(1.5 * DAY_MS);
  t.strictSame(warnings(), [SOON, SOON]);
  effects.advance(HOUR_MS);
  t.strictSame(warnings(), [EXPIRED]);
});

t.test('one that is not valid yet is warned of every day until it is', async (t) => {
  const { certificates, effects, warnings } = inUse(t, VALID_FROM_MS - 1.5 * DAY_MS);
  certificates.own();
  t.strictSame(warnings(), [NOT_YET]);
  effects.advance(DAY_MS);
  t.strictSame(warnings(), [NOT_YET]);
  effects.advance(DAY_MS);
  t.strictSame(warnings(), []);
});

t.test('after a reload only the certificate in use is warned of', async (t) => {
  const { certificates, effects, warnings, put } = inUse(t, VALID_TO_MS - 2.5 * DAY_MS);
  certificates.own();
  const openFiles = readdirSync('/proc/self/fd').length;
  t.strictSame(warnings(), [SOON]);
  certificates.renewOwn(() => undefined);
  t.strictSame(warnings(), [SOON], 'one that was read again is told of at once');
  put('localhost');
  certificates.renewOwn(() => {
    throw new AppError('invalid_request', 'the listener refuses it');
  });
  warnings();
  effects.advance(DAY_MS);
  t.strictSame(warnings(), [SOON], 'the old one is in use still');
  certificates.renewOwn(() => undefined);
  t.equal(readdirSync('/proc/self/fd').length, openFiles, 'no file stays open');
  effects.advance(3 * DAY_MS);
  t.strictSame(warnings(), []);
});

/** With expired.pem, at a time when it was valid. */
function inUse(t: Test, nowMs: number) {
  const directory = temporaryDirectory(t);
  const tls = { certPath: join(directory, 'cert.pem'), keyPath: join(directory, 'key.pem') };
  const put = (name: string) => {
    copyFileSync(join(FIXTURES, `${name}.pem`), tls.certPath);
    copyFileSync(join(FIXTURES, `${name}.key`), tls.keyPath);
  };
  put('expired');
  const { logger, lines } = keptLog<{ msg: string }>({ level: 'warn' });
  const effects = fakeEffects(nowMs);
  const certificates = certificatesOf({ tls, webhookCaFile: null } as ServeConfig, effects, logger);
  return { certificates, effects, put, warnings: () => lines.splice(0).map(({ msg }) => msg) };
}
