import { statSync } from 'node:fs';
import type { ServeConfig } from '../config.ts';
import { timestamp } from '../domain.ts';
import { DAY_MS, endsSoonFrom, SECOND_MS } from '../durations.ts';
import type { Effects } from '../effects.ts';
import { AppError } from '../errors.ts';
import type { Logger } from '../logger.ts';
import { readAuthorities } from '../pem.ts';
import { type Certificate, readCertificate } from './tls.ts';

/** Reads and checks the PEM files that the options name, anew at each call. Throws AppError with the option's name. */
export function certificatesOf({ tls, webhookCaFile }: ServeConfig, effects: Effects, logger: Logger) {
  let cancelWarning = () => {};

  return {
    /** Null: plain HTTP. */
    own(): Certificate | null {
      if (tls === null) return null;
      const certificate = readCertificate(tls);
      warnDaily(certificate);
      return certificate;
    },

    /** Null: only the default ones. */
    authorities: (): string | null => (webhookCaFile === null ? null : readTrusted(webhookCaFile)),

    /** Reads the certificate and its key again, and calls `use`, unless one is broken: then the old ones stay in use. */
    renewOwn(use: (certificate: Certificate) => void): void {
      if (tls === null) return;
      renew('the certificate', [tls.certPath, tls.keyPath], () => {
        const certificate = readCertificate(tls);
        use(certificate);
        warnDaily(certificate);
      });
    },

    /** The same for the certificates that receivers may be signed by. */
    renewAuthorities(use: (caPem: string) => void): void {
      if (webhookCaFile === null) return;
      renew('the certificates of --webhook-ca-file', [webhookCaFile], () => use(readTrusted(webhookCaFile)));
    },
  };

  function readTrusted(path: string): string {
    return readAuthorities('--webhook-ca-file', path);
  }

  function renew(what: string, paths: string[], readAndUse: () => void): void {
    try {
      for (const path of paths) requireFile(path);
      readAndUse();
      logger.info(`reloaded: ${what}`);
    } catch (error) {
      const problem = error instanceof AppError ? { problem: error.message } : { err: error };
      logger.error(problem, `not reloaded, the old one stays in use: ${what}`);
    }
  }

  /** Of the one in use, which may expire, or come near to that, while davit runs: then at once, and every day. */
  function warnDaily(certificate: Certificate): void {
    cancelWarning();
    warnIfInvalid(certificate);
    const { validFromMs, validToMs } = certificate;
    const nowMs = effects.now();
    const changes = [endsSoonFrom(validFromMs, validToMs), validToMs].filter((atMs) => atMs >= nowMs);
    // A second later, as a timer may be a little early.
    const untilMs = Math.min(nowMs + DAY_MS, ...changes.map((atMs) => atMs + SECOND_MS));
    cancelWarning = effects.after(untilMs - nowMs, () => warnDaily(certificate));
  }

  /** Only warns: this machine's clock may be the one that is wrong, and davit does more than to serve HTTPS. */
  function warnIfInvalid({ validFromMs, validToMs }: Certificate): void {
    const nowMs = effects.now();
    const validity = { valid_from: timestamp(validFromMs), valid_to: timestamp(validToMs) };
    if (nowMs > validToMs) {
      logger.warn(validity, 'the certificate has expired, and clients refuse it: renew it, then send SIGHUP');
    } else if (nowMs < validFromMs) {
      logger.warn(validity, 'the certificate is not valid yet, and clients refuse it: is the clock right?');
    } else if (nowMs > endsSoonFrom(validFromMs, validToMs)) {
      logger.warn(validity, 'the certificate expires soon: renew it, then send SIGHUP');
    }
  }
}

/** A pipe, which can be read at the start, would block the whole service if nobody writes to it any more. */
function requireFile(path: string): void {
  const isOther = statSync(path, { throwIfNoEntry: false })?.isFile() === false;
  if (isOther) throw new AppError('invalid_request', `${path} is not a regular file`);
}
