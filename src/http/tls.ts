import { createPrivateKey, type KeyObject } from 'node:crypto';
import { createSecureContext, type Server, type TlsOptions } from 'node:tls';
import { AppError, messageOf } from '../errors.ts';
import { readCertificates, readPem } from '../pem.ts';

/** A certificate with what it needs, and its key; both in PEM, and checked. */
export interface Certificate {
  chain: string;
  key: string;
  /** Milliseconds since 1970; of the server's own, not of those above it. */
  validFromMs: number;
  validToMs: number;
}

/**
 * Reads and checks what HTTPS is served with. Throws AppError `invalid_request` with the option's name for files that
 * cannot be read or do not go together. Whether it is valid at this time is the caller's to judge.
 */
export function readCertificate(paths: { certPath: string; keyPath: string }): Certificate {
  const { certPath, keyPath } = paths;
  const chain = readPem('--tls-cert', certPath);
  const [own] = readCertificates('--tls-cert', certPath, chain);
  const key = readPem('--tls-key', keyPath);
  if (!own.checkPrivateKey(parseKey(keyPath, key))) {
    throw refused(
      `--tls-key: ${keyPath} is not the key of the first certificate in ${certPath}: give the pair that was made ` +
        "together, with the server's own certificate before those of its authorities",
    );
  }
  try {
    createSecureContext({ ...SETTINGS, cert: chain, key });
  } catch (error) {
    throw refused(
      `--tls-cert: OpenSSL refuses ${certPath} (${messageOf(error)}): have another one made`,
      error,
    );
  }
  return {
    chain,
    key,
    validFromMs: own.validFromDate.getTime(),
    validToMs: own.validToDate.getTime(),
  };
}

/** What a TLS listener is made with. */
export function tlsOptions({ chain, key }: Pick<Certificate, 'chain' | 'key'>): TlsOptions {
  return { ...SETTINGS, cert: chain, key };
}

/** Connections from now on are shown this certificate; those that there are go on. */
export function replaceCertificate(listener: Server, certificate: Certificate): void {
  listener.setSecureContext(tlsOptions(certificate));
}

/** Node's own defaults at this time, written down so that no NODE_OPTIONS and no new Node changes them. */
const SETTINGS = { minVersion: 'TLSv1.2', ALPNProtocols: ['http/1.1'] } as const satisfies TlsOptions;

function parseKey(path: string, pem: string): KeyObject {
  try {
    return createPrivateKey(pem);
  } catch (error) {
    if (pem.includes('ENCRYPTED')) {
      throw refused(
        `--tls-key: ${path} is encrypted, and nobody is there to be asked: decrypt it with openssl pkey -in ${path}`,
        error,
      );
    }
    throw refused(`--tls-key: ${path} holds no private key in PEM`, error);
  }
}

function refused(message: string, cause?: unknown): AppError {
  return new AppError('invalid_request', message, { cause });
}
