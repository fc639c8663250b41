import { type Cidr, hostnameOf, isInside, parseCidr } from '../address.ts';
import { AppError } from '../errors.ts';
import type { CommandContext } from './command.ts';

type Environment = CommandContext['environment'];
export type Proxies = ReturnType<typeof proxiesOf>;

/**
 * The proxies that the environment names for this URL, as undici takes them; empty: none. Without a scheme a proxy is
 * http, as for curl. Throws AppError `invalid_request`, which names the variable but not its value, as that may hold a
 * password.
 */
export function proxiesOf(environment: Environment, url: URL) {
  const noProxy = environment['no_proxy'] ?? environment['NO_PROXY'] ?? '';
  return {
    // For https, undici would fall back to the proxy for http.
    httpProxy: url.protocol === 'https:' ? '' : proxyOf(environment, 'HTTP_PROXY'),
    httpsProxy: proxyOf(environment, 'HTTPS_PROXY'),
    // undici knows names and single addresses in it, and no blocks.
    noProxy: isInside(hostnameOf(url), blocksIn(noProxy)) ? '*' : noProxy,
  };
}

/** Also `127.0.0.1/8`, which curl, Go and Python take for the block of that address. */
function blocksIn(noProxy: string): Cidr[] {
  return noProxy
    .split(/[,\s]+/)
    .map((text) => parseCidr(text, { anyHostBits: true }))
    .flatMap((parsed) => (parsed.ok ? [parsed.cidr] : []));
}

function proxyOf(environment: Environment, upperName: string): string {
  const name = environment[upperName.toLowerCase()] === undefined ? upperName : upperName.toLowerCase();
  const text = environment[name] ?? '';
  if (text === '') return '';
  const url = URL.parse(/^[a-z][a-z\d+.-]*:\/\//i.test(text) ? text : `http://${text}`);
  if (
    url === null ||
    !/^https?:$/.test(url.protocol) ||
    url.pathname + url.search + url.hash !== '/' ||
    !canBeDecoded(url.username + url.password)
  ) {
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
