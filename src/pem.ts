import { X509Certificate } from 'node:crypto';
import { AppError } from './errors.ts';
import { readOptionFile } from './option-files.ts';

/** The text of the file that an option names. Throws AppError `invalid_request` with the option's name. */
export function readPem(optionName: string, path: string): string {
  return readOptionFile(optionName, path).toString();
}

const CERTIFICATE_BLOCK = /-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----[\s\S]*?-----END [^-]*-----/g;
/** As where files were joined of which one lacks its last line break. OpenSSL skips a byte order mark. */
const SHARED_LINE =
  /[^\r\n\ufeff]-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----|-----END (?:TRUSTED |X509 )?CERTIFICATE-----[^\S\r\n]*\S/;

/**
 * All certificates in the text of a PEM file, at least one. Throws AppError `invalid_request` with the option's name
 * where OpenSSL would silently skip what it cannot parse.
 */
export function readCertificates(
  optionName: string,
  path: string,
  pem: string,
): [X509Certificate, ...X509Certificate[]] {
  if (SHARED_LINE.test(pem)) {
    throw new AppError(
      'invalid_request',
      `${optionName}: ${path}: -----BEGIN CERTIFICATE----- and -----END CERTIFICATE----- must each stand on a line of their own`,
    );
  }
  const blocks = pem.match(CERTIFICATE_BLOCK) ?? [];
  try {
    const [first, ...more] = blocks.map((block) => new X509Certificate(block));
    if (first !== undefined) return [first, ...more];
  } catch (error) {
    throw new AppError('invalid_request', `${optionName}: ${path} holds a certificate that is damaged`, {
      cause: error,
    });
  }
  throw new AppError('invalid_request', `${optionName}: ${path} holds no certificate in PEM`);
}

/**
 * The text of a PEM file of trusted certificates, once they were checked. Throws AppError as the functions above do.
 */
export function readAuthorities(optionName: string, path: string): string {
  const pem = readPem(optionName, path);
  readCertificates(optionName, path, pem);
  return pem;
}
