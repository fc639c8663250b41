import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import { type DiagnosticsChannel, errors } from 'undici';
import { messageOf } from '../errors.ts';
import { GaveUp } from './patience.ts';
import type { Proxies } from './proxies.ts';

/* What becomes of the connections over which davit deploy sends its requests. */

/**
 * Watches the connections of undici: which of these proxies they go through, and which errors they ended with before
 * anything was sent. Hosts are as in URLs: with a port unless it is the default.
 */
export function watchConnections({ httpProxy, httpsProxy }: Proxies) {
  const hosts = [httpProxy, httpsProxy].map((text) => URL.parse(text)?.host);
  /** The errors of connections that were not established, and those of them that should have led to a proxy. */
  const unestablished = new WeakSet<object>();
  const unreachedProxies = new WeakSet<object>();
  let usedHost: string | undefined;
  const noteBegin = (message: unknown) => {
    const { connectParams } = message as DiagnosticsChannel.ClientBeforeConnectMessage;
    if (hosts.includes(connectParams.host)) usedHost = connectParams.host;
  };
  const noteError = (message: unknown) => {
    const { error, connectParams } = message as DiagnosticsChannel.ClientConnectErrorMessage;
    unestablished.add(error);
    if (hosts.includes(connectParams.host)) unreachedProxies.add(error);
  };
  subscribe('undici:client:beforeConnect', noteBegin);
  subscribe('undici:client:connectError', noteError);

  return {
    /** Whether a request failed before anything of it was sent. */
    isUnsent: (error: unknown): boolean => unestablished.has(Object(error)),

    /** How messages call the place at which a request to `host` failed with this error. */
    placeOf(host: string, error?: unknown): string {
      if (usedHost === undefined) return host;
      return unreachedProxies.has(Object(error))
        ? `the proxy ${usedHost}`
        : `${host} behind the proxy ${usedHost}`;
    },
    stop() {
      unsubscribe('undici:client:beforeConnect', noteBegin);
      unsubscribe('undici:client:connectError', noteError);
    },
  };
}

/** The status with which a proxy refused a request; undefined: it was another error. */
export function proxyStatusOf(error: unknown): number | undefined {
  const [, digits] = /^Proxy .*\((\d{3})\)/.exec(error instanceof Error ? error.message : '') ?? [];
  return digits === undefined ? undefined : Number(digits);
}

/** Whether a connection failed or was lost for a reason that may pass. */
export function isDropped(error: unknown): boolean {
  const code = firstCodeOf(error);
  return /^(E(CONN|PIPE|TIMEDOUT|HOST|NET|AI_AGAIN)|UND_ERR_(SOCKET|CONNECT|PRX_CONN|HEADERS_TIMEOUT|BODY_TIMEOUT|RES_CONTENT|ABORTED))/.test(
    code,
  );
}

/** What happened to a connection that failed or was lost. `place`: how messages call where it leads to. */
export function failureText(error: unknown, place: string): string {
  if (isSilence(error)) return `${place} does not answer`;
  const code = firstCodeOf(error);
  if (code === 'UND_ERR_SOCKET') return `${place} closed the connection`;
  const why = code === 'UND_ERR_CONNECT_TIMEOUT' ? 'ETIMEDOUT' : code;
  return `${place} cannot be reached (${proxyStatusOf(error) ?? why})`;
}

/** Whether a connection was given up as nothing came over it. */
export function isSilence(error: unknown): boolean {
  return /^UND_ERR_(?:HEADERS|BODY)_TIMEOUT$/.test(firstCodeOf(error));
}

/** Whether what came was not HTTP. In place of davit's answer, a proxy that failed half-way has cut it off. */
export function isGarbled(error: unknown): boolean {
  return firstOf(error) instanceof errors.HTTPParserError;
}

/**
 * An error that a retry does not help with, such as an unknown host or an untrusted certificate, as GaveUp in words; any
 * other error as it is. `place`: how messages call where the request was sent.
 */
export function explained(error: unknown, place: string): unknown {
  const message = explanationOf(error, place);
  return message === undefined ? error : new GaveUp(message, { cause: error });
}

/** For errors of certificates that --ca-file cannot solve. */
const CERTIFICATE_ADVICE: Record<string, string> = {
  CERT_HAS_EXPIRED: 'its certificate has expired, and has to be renewed there',
  CERT_NOT_YET_VALID: 'its certificate is not valid yet: are the clocks right, here and there?',
  ERR_TLS_CERT_ALTNAME_INVALID: 'its certificate is for another name: is the URL right?',
};

/** Codes of Node for certificates that do not name them; the last one is that of all rarer reasons, such as a weak key. */
const REFUSED_CERTIFICATE = /^(?:INVALID_CA|INVALID_PURPOSE|PATH_LENGTH_EXCEEDED|UNSPECIFIED)$/;

function explanationOf(error: unknown, place: string): string | undefined {
  const code = firstCodeOf(error);
  if (proxyStatusOf(error) === 407)
    return `${place} cannot be reached: the proxy requires a user and a password`;
  if (error instanceof errors.ClientDestroyedError) return `the client of ${place} is closed`;
  if (code === 'ENOTFOUND') return `${place} has no address: is the name right?`;
  if (isGarbled(error)) return `${place} does not answer in HTTP: is the URL right?`;
  if (error instanceof errors.HeadersOverflowError)
    return `${place} does not answer as davit does: is the URL right?`;
  if (/SSL_(WRONG_VERSION_NUMBER|PACKET_LENGTH_TOO_LONG)/.test(code)) {
    return `${place} does not speak TLS: is it http:// in place of https://?`;
  }
  if (/^ERR_SSL_.*_ALERT_/.test(code)) return `${place} refuses to speak TLS with davit (${code})`;
  if (/CERT|TLS|SSL|VERIFY|SIGNED/.test(code)) {
    const advice = CERTIFICATE_ADVICE[code] ?? '--ca-file makes davit trust an authority of your own';
    return `${place} cannot be trusted (${code}): ${advice}`;
  }
  if (REFUSED_CERTIFICATE.test(code)) {
    const reason = messageOf(firstOf(error));
    return `${place} cannot be trusted (${reason}): its certificate has to be replaced there`;
  }
  return undefined;
}

/** The system's or the library's code of the first error; empty if it has none. */
export function firstCodeOf(error: unknown): string {
  const first = firstOf(error);
  return first instanceof Error && 'code' in first ? String(first.code) : '';
}

/** Several addresses may have been tried, and each has its error. */
function firstOf(error: unknown): unknown {
  return error instanceof AggregateError && error.errors.length > 0 ? firstOf(error.errors[0]) : error;
}
