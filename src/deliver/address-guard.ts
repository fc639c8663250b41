import type { LookupAddress } from 'node:dns';
import { isIP, type LookupFunction } from 'node:net';
import { networkInterfaces } from 'node:os';
import { type Cidr, isInside, judgeAddress, listenedAddress, loopbackOf } from '../address.ts';
import type { ListenAddress } from '../config.ts';
import type { Effects } from '../effects.ts';
import { AttemptError } from './attempt-error.ts';
import type { Owner } from './key-shares.ts';
import { createResolver, type ResolverOptions } from './resolver.ts';

export interface GuardOptions extends ResolverOptions {
  allowedCidrs: readonly Cidr[];
  /**
   * Where davit itself listens: refused like private addresses, unless `allowedCidrs` contains them. A wildcard address,
   * however it is spelled, or a host name means every address of this machine; port 0 means every port.
   */
  refusedAddresses?: readonly ListenAddress[];
  /** The addresses of this machine, by default read from the system; tests bring their own. */
  machineAddresses?: () => readonly string[];
}

interface AddressGuard {
  /**
   * Resolves names for a socket that connects to this port for a webhook of this key. Fails with an AttemptError if there
   * is no address, or if any is not allowed.
   */
  lookupFor(port: number, key: Owner): LookupFunction;
  /** Why an address literal, for which the socket calls no `lookup`, may not be connected to; null: it may. */
  literalRefusal(address: string, port: number): Error | null;
}

/**
 * Judges to which addresses connections may go. The addresses that are checked are the ones that the socket uses, against
 * DNS rebinding: a name is resolved once for each connection, and refused if any of what the resolver returns is not
 * allowed.
 */
export function createAddressGuard(options: GuardOptions, effects: Effects): AddressGuard {
  const { allowedCidrs, refusedAddresses = [], machineAddresses = interfaceAddresses } = options;
  const resolve = createResolver(options, effects);
  const listeners = refusedAddresses.map((listener) => listenerOf(listener, machineAddresses));

  return {
    lookupFor: (port, key) => (hostname, _options, callback) => {
      // `autoSelectFamily` expects a list.
      judgedAddresses(hostname, port, key).then(
        (addresses) => callback(null, addresses),
        (error: AttemptError) => callback(error, []),
      );
    },
    literalRefusal(address, port) {
      try {
        return allowedAt(port)(address) ? null : new AttemptError('address_refused');
      } catch (error) {
        return error as Error; // of the system, which has no file descriptor left to read this machine's addresses
      }
    },
  };

  async function judgedAddresses(hostname: string, port: number, key: Owner): Promise<LookupAddress[]> {
    const addresses = await addressesOf(hostname, key);
    if (addresses.length === 0) throw new AttemptError('dns');
    const isAllowed = allowedAt(port);
    if (!addresses.every(({ address }) => isAllowed(address))) throw new AttemptError('address_refused');
    return [...addresses];
  }

  async function addressesOf(hostname: string, key: Owner): Promise<readonly LookupAddress[]> {
    const loopback = loopbackOf(hostname, allowedCidrs);
    if (loopback?.length === 0) throw new AttemptError('address_refused');
    if (loopback !== undefined) return loopback.map((address) => ({ address, family: isIP(address) }));
    return resolve(hostname, key).catch((error: unknown) => {
      throw new AttemptError('dns', { cause: error });
    });
  }

  /**
   * Returns a function that tells whether davit may connect to an address at this port. Throws the system's error if the
   * addresses of this machine cannot be read.
   */
  function allowedAt(port: number): (address: string) => boolean {
    const own = listeners.map((listensAt) => listensAt(port));
    return (address) => {
      if (isInside(address, allowedCidrs)) return true;
      return !own.some((isAt) => isAt(address)) && judgeAddress(address, []) === 'allowed';
    };
  }
}

function interfaceAddresses(): string[] {
  return Object.values(networkInterfaces()).flatMap((list) => list?.map(({ address }) => address) ?? []);
}

/** Gives a function that tells whether a connection to an address, at this port, may end at the listener. */
type Listener = (port: number) => (ip: string) => boolean;

function listenerOf(listen: ListenAddress, machineAddresses: () => readonly string[]): Listener {
  const own = listenedAddress(listen.host);
  return (port) => {
    if (listen.port !== port && listen.port !== 0) return () => false;
    if (own !== null) return (ip) => isInside(ip, [own]);
    // Read for each connection, as a machine's addresses change, but not for each address: it takes 0.1 ms. A host name
    // counts as all of them: it is not resolved.
    const addresses = machineAddresses();
    return (ip) => addresses.includes(ip);
  };
}
