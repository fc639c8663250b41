import { copyFileSync } from 'node:fs';
import { join } from 'node:path';
import { pino } from 'pino';
import t from 'tap';
import type { ServeConfig } from '../../src/config.ts';
import { DAY_MS } from '../../src/durations.ts';
import { certificatesOf } from '../../src/http/certificates.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { temporaryDirectory } from '../helpers/store.ts';

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');
/** Of localhost.pem. */
const VALID_TO_MS = Date.UTC(2099, 11, 31, 23, 59, 59);

t.test('a certificate with less than 14 days left is warned of at the start and each day', async (t) => {
  const directory = temporaryDirectory(t);
  const tls = { certPath: join(directory, 'cert.pem'), keyPath: join(directory, 'key.pem') };
  const use = (name: string) => {
    copyFileSync(join(FIXTURES, `${name}.pem`), tls.certPath);
    copyFileSync(join(FIXTURES, `${name}.key`), tls.keyPath);
  };
  use('localhost');
  const warnings: string[] = [];
  const logger = pino({ level: 'warn' }, { write: (line) => void warnings.push(JSON.parse(line).msg) });
  const effects = fakeEffects(VALID_TO_MS - 15 * DAY_MS);
  const certificates = certificatesOf({ tls, webhookCaFile: null } as ServeConfig, effects, logger);
  const SOON = 'the certificate expires soon: renew it, then send SIGHUP';
  const EXPIRED = 'the certificate has expired, and clients refuse it: renew it, then send SIGHUP';

  certificates.own();
  effects.advance(DAY_MS);
  t.strictSame(warnings.splice(0), []);
  effects.advance(14 * DAY_MS);
  t.strictSame(warnings.splice(0), Array(14).fill(SOON));
  effects.advance(DAY_MS);
  t.strictSame(warnings.splice(0), [EXPIRED]);
  effects.jump(-2 * DAY_MS);
  certificates.renewOwn(() => undefined);
  t.strictSame(warnings.splice(0), [SOON], 'one that was read again is told of at once');
  effects.advance(DAY_MS);
  t.strictSame(warnings.splice(0), [SOON], 'and only the one in use');
});
