import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import type { DiagnosticsChannel } from 'undici';
import { AppError } from '../errors.ts';
import type { CommandContext } from './command.ts';

type Environment = CommandContext['environment'];
type Proxies = ReturnType<typeof proxiesOf>;

/**
 * The proxies that the environment names for this URL, as undici takes them; empty: none. Without a scheme a proxy is
 * http, as for curl. Throws AppError `invalid_request`, which names the variable but not its value, as that may hold a
 * password.
 */
export function proxiesOf(environment: Environment, { protocol }: URL) {
  return {
    // For https, undici would fall back to the proxy for http.
    httpProxy: protocol === 'https:' ? '' : proxyOf(environment, 'HTTP_PROXY'),
    httpsProxy: proxyOf(environment, 'HTTPS_PROXY'),
    noProxy: environment['no_proxy'] ?? environment['NO_PROXY'] ?? '',
  };
}

function proxyOf(environment: Environment, upperName: string): string {
  const name = environment[upperName.toLowerCase()] === undefined ? upperName : upperName.toLowerCase();
  const text = environment[name] ?? '';
  if (text === '') return '';
  const url = URL.parse(/^[a-z][a-z\d+.-]*:\/\//i.test(text) ? text : `http://${text}`);
  if (url === null || !/^https?:$/.test(url.protocol) || !canBeDecoded(url.username + url.password)) {
    throw new AppError(
      'invalid_request',
      `${name} is no proxy that davit can use: it must be like http://proxy.example.com:3128`,
    );
  }
  return url.href;
}

function canBeDecoded(text: string): boolean {
  try {
    decodeURIComponent(text);
    return true;
  } catch {
    return false;
  }
}

/**
 * Watches which of these proxies connections go through. Hosts are as in URLs: with a port unless it is the default.
 */
export function watchProxies({ httpProxy, httpsProxy }: Proxies) {
  const hosts = [httpProxy, httpsProxy].map((text) => URL.parse(text)?.host);
  const unreached = new WeakSet<Error>();
  let usedHost: string | undefined;
  const noteBegin = (message: unknown) => {
    const { connectParams } = message as DiagnosticsChannel.ClientBeforeConnectMessage;
    if (hosts.includes(connectParams.host)) usedHost = connectParams.host;
  };
  const noteError = (message: unknown) => {
    const { error, connectParams } = message as DiagnosticsChannel.ClientConnectErrorMessage;
    if (hosts.includes(connectParams.host)) unreached.add(error);
  };
  subscribe('undici:client:beforeConnect', noteBegin);
  subscribe('undici:client:connectError', noteError);

  return {
    /** How messages call the place at which a request to `host` failed with this error. */
    placeOf(host: string, error?: unknown): string {
      if (usedHost === undefined) return host;
      const isProxy = error instanceof Error && unreached.has(error);
      return isProxy ? `the proxy ${usedHost}` : `${host} behind the proxy ${usedHost}`;
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
