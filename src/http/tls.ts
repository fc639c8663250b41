import { createPrivateKey, type KeyObject } from 'node:crypto';
import { createSecureContext, type Server, type TlsOptions } from 'node:tls';
import { AppError, messageOf } from '../errors.ts';
import { readCertificates, readPem } from '../pem.ts';
import { quoteForBash } from '../shell-words.ts';

/** A server certificate with its chain, and its key; both in PEM, and checked to be a pair. */
export interface Certificate {
  chain: string;
  key: string;
  /** Milliseconds since 1970, of the server's own certificate, not of its authorities. */
  validFromMs: number;
  validToMs: number;
}

/**
 * Reads and checks the certificate and key for HTTPS. Throws AppError `invalid_request` with the option's name for files
 * that cannot be read or are not a pair. Does not check whether the certificate is valid now.
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
    createSecureContext(tlsOptions({ chain, key }));
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

/**
 * Options for a TLS listener. Besides the certificate, Node's current defaults: set explicitly so that neither
 * NODE_OPTIONS nor a new Node changes them.
 */
export function tlsOptions({ chain, key }: Pick<Certificate, 'chain' | 'key'>): TlsOptions {
  return { minVersion: 'TLSv1.2', ALPNProtocols: ['http/1.1'], cert: chain, key };
}

/** Uses this certificate for new connections; existing ones continue. */
export function replaceCertificate(listener: Server, certificate: Certificate): void {
  listener.setSecureContext(tlsOptions(certificate));
}

function parseKey(path: string, pem: string): KeyObject {
  try {
    return createPrivateKey(pem);
  } catch (error) {
    if (pem.includes('ENCRYPTED')) {
      throw refused(
        `--tls-key: ${path} is encrypted, and nobody can be asked for its passphrase: decrypt it with openssl pkey -in ${quoteForBash(path)}`,
        error,
      );
    }
    throw refused(`--tls-key: ${path} holds no private key in PEM`, error);
  }
}

function refused(message: string, cause?: unknown): AppError {
  return new AppError('invalid_request', message, { cause });
}
