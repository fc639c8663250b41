import type { ServeConfig } from '../config.ts';
import { timestamp } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { readAuthorities } from '../pem.ts';
import { type Certificate, readCertificate } from './tls.ts';

/** The files in PEM that the options name, read and checked at each call. Throws AppError with the option's name. */
export function certificatesOf({ tls, webhookCaFile }: ServeConfig, effects: Effects, logger: Logger) {
  return {
    /** Null: plain HTTP. */
    own(): Certificate | null {
      if (tls === null) return null;
      const certificate = readCertificate(tls);
      judgeValidity(certificate);
      return certificate;
    },

    /** Null: no others than the usual ones. */
    authorities: (): string | null =>
      webhookCaFile === null ? null : readAuthorities('--webhook-ca-file', webhookCaFile),

    /** What is broken does not take the place of what works. */
    renew<Read>(what: string, read: () => Read | null, use: (read: Read) => void): void {
      try {
        const renewed = read();
        if (renewed === null) return;
        use(renewed);
        logger.info(`read anew: ${what}`);
      } catch (error) {
        const problem = error instanceof AppError ? { problem: error.message } : { err: error };
        logger.error(problem, `not read anew, so the old stays in use: ${what}`);
      }
    },
  };

  /** No reason to refuse it: it may be another clock that is wrong, and davit has more to do than to be called. */
  function judgeValidity({ validFromMs, validToMs }: Certificate): void {
    const nowMs = effects.now();
    const validity = { valid_from: timestamp(validFromMs), valid_to: timestamp(validToMs) };
    if (nowMs > validToMs) {
      logger.warn(validity, 'the certificate has expired, and clients refuse it: renew it, then send SIGHUP');
    } else if (nowMs < validFromMs) {
      logger.warn(validity, 'the certificate is not valid yet, and clients refuse it: is the clock right?');
    }
  }
}
