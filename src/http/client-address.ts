import { isIP } from 'node:net';
import type { Request } from '@hapi/hapi';
import ipaddr from 'ipaddr.js';
import { type Cidr, isInside } from '../address.ts';

/**
 * Tells the address of the client that made a request: that of the connection or, if that is a trusted proxy, the last
 * one in X-Forwarded-For that is not a trusted proxy. Entries to the left of it may be forged.
 */
export function createClientAddress(
  trustedProxies: readonly Cidr[],
): (request: Pick<Request, 'raw'>) => string {
  return ({ raw: { req } }) => {
    let address = normalAddress(req.socket.remoteAddress ?? '') ?? 'unknown';
    const forwardedFor = req.headers['x-forwarded-for'];
    if (trustedProxies.length === 0 || typeof forwardedFor !== 'string') return address;
    for (const entry of forwardedFor.split(',').reverse()) {
      if (!isInside(address, trustedProxies)) return address;
      const before = normalAddress(withoutPort(entry.trim()));
      // Not an address, so the trusted proxy itself counts as the client.
      if (before === undefined) return address;
      address = before;
    }
    return address;
  };
}

/** What failed attempts are counted by: an IPv4 address, or the /64 that an IPv6 client has at least to itself. */
export function addressGroup(address: string): string {
  if (isIP(address) !== 6) return address;
  const parsed = ipaddr.process(withoutZone(address));
  if (parsed.kind() === 'ipv4') return parsed.toString();
  return `${ipaddr.IPv6.networkAddressFromCIDR(`${parsed.toString()}/64`).toString()}/64`;
}

/** The canonical spelling of an address; IPv4-mapped IPv6 becomes IPv4. Undefined: not an address. */
function normalAddress(text: string): string | undefined {
  // ipaddr.js also takes `1` and `0x7f.1` for addresses; Node's own test does not.
  return isIP(text) === 0 ? undefined : ipaddr.process(withoutZone(text)).toString();
}

/** `fe80::1%br-0` without its zone: ipaddr.js throws at the names of some interfaces. */
function withoutZone(address: string): string {
  return address.replace(/%.*$/s, '');
}

/** Some proxies write `192.0.2.1:4711` and `[2001:db8::1]:4711`. */
function withoutPort(entry: string): string {
  const bracketed = /^\[([^\]]*)\](?::\d+)?$/.exec(entry);
  if (bracketed?.[1] !== undefined) return bracketed[1];
  return /^[\d.]+:\d+$/.test(entry) ? entry.slice(0, entry.indexOf(':')) : entry;
}
