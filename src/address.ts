import { isIP } from 'node:net';
import ipaddr from 'ipaddr.js';

/** An IPv4 or IPv6 address block, in 4 or 16 bytes. A plain value, so that it can be posted to a worker thread. */
export interface Cidr {
  readonly bytes: readonly number[];
  readonly prefixLength: number;
}

type CidrResult = { ok: true; cidr: Cidr } | { ok: false; reason: string };

/** Parses `10.0.0.0/8` or `fd00::/8`; an address alone is a block of one. Host bits must be zero, unless any may be set. */
export function parseCidr(text: string, { anyHostBits = false } = {}): CidrResult {
  const [address = '', prefix, ...rest] = text.split('/');
  const bytes = bytesOf(address);
  if (bytes === undefined || address.includes('%') || rest.length > 0) {
    return { ok: false, reason: 'must be an address or a block such as 10.0.0.0/8 or fd00::/8' };
  }
  const bits = bytes.length * 8;
  if (prefix !== undefined && !(/^(0|[1-9]\d{0,2})$/.test(prefix) && Number(prefix) <= bits)) {
    return { ok: false, reason: `must end in a prefix length from 0 to ${bits}` };
  }
  const prefixLength = prefix === undefined ? bits : Number(prefix);
  const network = bytes.map((byte, index) => byte & maskOfByte(prefixLength, index));
  if (!anyHostBits && network.some((byte, index) => byte !== bytes[index])) {
    return { ok: false, reason: 'must be the first address of its block: bits after the prefix are set' };
  }
  return { ok: true, cidr: { bytes: network, prefixLength } };
}

/** Whether any of the blocks contains the address. IPv4-mapped ones (`::ffff:10.0.0.1`) match IPv6 blocks only. */
export function isInside(ip: string, cidrs: readonly Cidr[]): boolean {
  const bytes = bytesOf(ip);
  return bytes !== undefined && cidrs.some((cidr) => holds(cidr, bytes));
}

/**
 * Whether davit may connect to the address: it must be public unicast, or in one of the `allowed` blocks. Text that is
 * not an address in standard notation is refused. Refused are all entries of IANA's special-purpose registries
 * (RFC 6890 and later), even the globally reachable ones, such as anycast relays: no receiver is hosted there.
 */
export function judgeAddress(ip: string, allowed: readonly Cidr[]): 'allowed' | 'refused' {
  const bytes = bytesOf(ip);
  if (bytes === undefined) return 'refused';
  if (allowed.some((cidr) => holds(cidr, bytes))) return 'allowed';
  if (bytes.length === 16 && !holds(GLOBAL_UNICAST, bytes)) return 'refused';
  return SPECIAL.some((cidr) => holds(cidr, bytes)) ? 'refused' : 'allowed';
}

/**
 * The one address at which a socket bound to `ip` accepts connections; for an IPv4-mapped address that is the IPv4
 * address. Null for a wildcard in any spelling, as that accepts on every address, and for text that is not an address.
 */
export function listenedAddress(ip: string): Cidr | null {
  const bound = bytesOf(ip) ?? [];
  const bytes = holds(MAPPED, bound) ? bound.slice(12) : bound;
  return bytes.every((byte) => byte === 0) ? null : { bytes, prefixLength: bytes.length * 8 };
}

/**
 * The allowed loopback addresses for a `localhost` name; undefined for every other name. Such names are never looked up
 * in DNS, which could return any address (RFC 6761, section 6.3).
 */
export function loopbackOf(hostname: string, allowed: readonly Cidr[]): string[] | undefined {
  if (!/(^|\.)localhost\.*$/i.test(hostname)) return undefined;
  return ['127.0.0.1', '::1'].filter((address) => judgeAddress(address, allowed) === 'allowed');
}

export interface UrlRules {
  allowHttp: boolean;
  allowedCidrs: readonly Cidr[];
}

type WebhookUrlResult = { ok: true; url: string } | { ok: false; reason: string };

export const URL_MAX_LENGTH = 2048;

/**
 * Checks the URL of a webhook and normalises it (WHATWG). Deliveries use the returned text, so the URL that was checked
 * is the URL that is used. Host names are not resolved here: each attempt checks the addresses that it connects to.
 * Reasons never repeat the value.
 */
export function parseWebhookUrl(value: unknown, rules: UrlRules): WebhookUrlResult {
  if (typeof value !== 'string') return { ok: false, reason: 'must be a string' };
  const problem = textProblem(value);
  if (problem !== undefined) return { ok: false, reason: problem };
  const url = URL.parse(value);
  if (url === null) return { ok: false, reason: 'must be a valid URL' };
  const reason = urlProblem(url, rules);
  return reason === undefined ? { ok: true, url: url.href } : { ok: false, reason };
}

/** Checks for what the WHATWG parser would silently strip or repair. */
function textProblem(text: string): string | undefined {
  if (text === '') return 'must not be empty';
  if (text.length > URL_MAX_LENGTH) return `must be at most ${URL_MAX_LENGTH} characters`;
  if (/[\s\p{Cc}\p{Cs}\\]/u.test(text)) {
    return 'must not contain white space, control characters or backslashes';
  }
  if (!/^https?:\/\/[^/]/i.test(text)) return 'must begin with https://';
  if (text.includes('#')) return 'must not have a fragment';
  const [authority = ''] = text.slice(text.indexOf('//') + 2).split(/[/?]/);
  if (authority.includes('@')) return 'must not contain a user name or password';
  return undefined;
}

function urlProblem(url: URL, { allowHttp, allowedCidrs }: UrlRules): string | undefined {
  if (url.href.length > URL_MAX_LENGTH)
    return `must be at most ${URL_MAX_LENGTH} characters, percent-encoded`;
  if (url.protocol !== 'https:' && !allowHttp) return 'must begin with https://';
  if (url.port === '0') return 'must not use port 0';
  const hostname = hostnameOf(url);
  if (isIP(hostname) === 0 && !isDnsName(hostname)) {
    return 'must have a host name that DNS can hold: 1 to 63 characters between dots, and 253 in all';
  }
  const loopback = loopbackOf(hostname, allowedCidrs);
  const refused = isIP(hostname) !== 0 && judgeAddress(hostname, allowedCidrs) === 'refused';
  if (refused || loopback?.length === 0) {
    return 'must lead to a public address, not to a private, local or reserved one';
  }
  return undefined;
}

/** RFC 1035, section 2.3.4; one dot at the end is the root. */
function isDnsName(hostname: string): boolean {
  const name = hostname.replace(/\.$/, '');
  return name.length <= 253 && name.split('.').every((label) => label.length >= 1 && label.length <= 63);
}

/** The host name or address of a URL, an IPv6 address without its brackets. */
export function hostnameOf(url: URL): string {
  return url.hostname.replace(/^\[|\]$/g, '');
}

function bytesOf(ip: string): number[] | undefined {
  // ipaddr.js also accepts `127.1` and `0x7f000001`, which Node's sockets do not take for addresses.
  return isIP(ip) !== 0 && ipaddr.isValid(ip) ? ipaddr.parse(ip).toByteArray() : undefined;
}

function holds(cidr: Cidr, bytes: readonly number[]): boolean {
  return (
    bytes.length === cidr.bytes.length &&
    bytes.every((byte, index) => (byte & maskOfByte(cidr.prefixLength, index)) === cidr.bytes[index])
  );
}

/** The mask of byte `index` in a prefix of `prefixLength` bits. */
function maskOfByte(prefixLength: number, index: number): number {
  const covered = Math.min(8, Math.max(0, prefixLength - index * 8));
  return (0xff << (8 - covered)) & 0xff;
}

/** The only IPv6 block from which IANA assigns public unicast addresses. */
const GLOBAL_UNICAST = block('2000::/3');

/** IPv4-mapped IPv6 addresses, RFC 4291, section 2.5.5.2. */
const MAPPED = block('::ffff:0.0.0.0/96');

const SPECIAL = [
  '0.0.0.0/8', // "this network", RFC 791
  '10.0.0.0/8', // private, RFC 1918
  '100.64.0.0/10', // shared by carriers, RFC 6598; one cloud's metadata is 100.100.100.200
  '127.0.0.0/8', // loopback, RFC 1122
  '168.63.129.16/32', // the host agent of a cloud, though the address is in a public range
  '169.254.0.0/16', // link-local, RFC 3927; metadata of most clouds
  '172.16.0.0/12', // private, RFC 1918
  '192.0.0.0/24', // protocol assignments, RFC 6890
  '192.0.2.0/24', // documentation, RFC 5737
  '192.31.196.0/24', // AS112, RFC 7535
  '192.52.193.0/24', // AMT relays, RFC 7450
  '192.88.99.0/24', // 6to4 relays, RFC 7526
  '192.168.0.0/16', // private, RFC 1918
  '192.175.48.0/24', // AS112, RFC 7534
  '198.18.0.0/15', // benchmarks, RFC 2544
  '198.51.100.0/24', // documentation, RFC 5737
  '203.0.113.0/24', // documentation, RFC 5737
  '224.0.0.0/4', // multicast, RFC 5771
  '240.0.0.0/4', // reserved, RFC 1112; broadcast
  '2001::/23', // protocol assignments, RFC 2928: Teredo, ORCHID, benchmarks, AS112 and others
  '2001:db8::/32', // documentation, RFC 3849
  '2002::/16', // 6to4, RFC 3056: embeds an IPv4 address
  '2620:4f:8000::/48', // AS112, RFC 7534
  '3ffe::/16', // the former 6bone, RFC 3701
  '3fff::/20', // documentation, RFC 9637
].map(block);

/** Only for constants. Not by `parseCidr`: compiling the regular expressions of Node's isIP adds 4 ms to each start. */
function block(text: string): Cidr {
  const [address, prefixLength] = ipaddr.parseCIDR(text);
  return { bytes: address.toByteArray(), prefixLength };
}
