import type { LookupAddress } from 'node:dns';
import { isIP, type LookupFunction, connect as openTcp } from 'node:net';
import { networkInterfaces } from 'node:os';
import { createSecureContext, getCACertificates, connect as openTls, type SecureContext } from 'node:tls';
import { type Cidr, hostnameOf, isInside, judgeAddress, listenedAddress, loopbackOf } from '../address.ts';
import type { ListenAddress } from '../config.ts';
import { type Effects, LONGEST_TIMER_MS } from '../effects.ts';
import { putLatest } from '../latest.ts';
import { type Ask, createResolver, type Reputation } from './resolver.ts';

export interface ConnectorOptions {
  /** How long a connection may take at most; whoever waits for it may give up before. */
  timeoutMs: number;
  allowedCidrs: readonly Cidr[];
  /**
   * Where davit itself listens: refused like a private address, unless `allowedCidrs` opens it. A wildcard, however it
   * is spelled, and a name stand for every address of this machine, port 0 for every port.
   */
  refusedAddresses?: readonly ListenAddress[];
  /** Certificates in PEM that are trusted besides the usual ones. */
  caPem?: string | null;
  /** All addresses of a name: asks the system's resolver unless a test brings its own. */
  resolve?: Ask;
  /** The addresses of this machine: asks the system unless a test brings its own. */
  machineAddresses?: () => readonly string[];
}

/** Why an attempt came to nothing; the message is what its `error` shows. */
export class AttemptError extends Error {
  override readonly name = 'AttemptError';
}

export interface Connector {
  connect: Connect;
  /** In place of `caPem`, for connections from now on. */
  trust(caPem: string): void;
}

/** Opens one connection to where a URL leads, TLS where it says `https:`. */
export type Connect = (url: URL, hears: SocketEvents, reputation: Reputation) => OpenSocket;

interface OpenSocket {
  /** Where it leads; null until it is connected. */
  remoteAddress(): string | null;
  /** Once it is connected. */
  write(text: string): void;
  /** What was written and the receiver has not taken, as far as it waits here. Over TLS that is heard of late. */
  waitingBytes(): number;
  /** Closes it, or calls it off. Nothing is heard of it any more. */
  destroy(): void;
}

/** What is heard of a connection, never before `connect` returned. */
export interface SocketEvents {
  /** It may be written to: certificates are checked. */
  connected(): void;
  /** The bytes are overwritten by the next ones, of whichever connection. */
  received(bytes: Buffer): void;
  /** The last that is heard: no more can come. Null: the receiver closed it in order. */
  closed(error: Error | null): void;
}

const TLS_SESSIONS_MAX = 1_000;

/** What all connections are read into: what came is looked at before anything else is read. */
const received = Buffer.allocUnsafeSlow(64 * 1024);

/**
 * Connects only to addresses that are judged to be allowed, and judges the very answers that the socket uses:
 * a name is resolved once for each connection, and one answer that is not allowed refuses them all.
 */
export function createConnector(options: ConnectorOptions, effects: Effects): Connector {
  const { timeoutMs, allowedCidrs, refusedAddresses = [], caPem = null } = options;
  const { machineAddresses = interfaceAddresses } = options;
  const resolve = createResolver(options.resolve, timeoutMs, effects);
  const listeners = refusedAddresses.map((listener) => listenerOf(listener, machineAddresses));
  let secureContext = secureContextOf(caPem);
  const sessions = new Map<string, Buffer>();

  return {
    connect,
    trust(caPem) {
      secureContext = secureContextOf(caPem);
      // Who resumes a session is not asked for a certificate again.
      sessions.clear();
    },
  };

  function connect(url: URL, hears: SocketEvents, reputation: Reputation): OpenSocket {
    const { protocol } = url;
    const hostname = hostnameOf(url);
    const port = Number(url.port || (protocol === 'https:' ? 443 : 80));
    let listener: SocketEvents | undefined = hears;
    const close = (error: Error | null) => {
      listener?.closed(error);
      listener = undefined;
    };
    // The socket never asks `lookup` about a literal.
    if (isIP(hostname) !== 0 && !isAllowed(hostname, port)) {
      queueMicrotask(() => close(new AttemptError('address_refused')));
      return {
        remoteAddress: () => null,
        write() {},
        waitingBytes: () => 0,
        destroy: () => (listener = undefined),
      };
    }
    const how = {
      host: hostname,
      port,
      lookup: guardedLookup(port, reputation),
      noDelay: true,
      autoSelectFamily: true,
      // The default of 250 ms gives up on addresses that are merely far away; the last one gets all the rest.
      autoSelectFamilyAttemptTimeout: Math.min(Math.max(250, Math.floor(timeoutMs / 5)), LONGEST_TIMER_MS),
      onread: {
        buffer: received,
        callback(length: number) {
          listener?.received(received.subarray(0, length));
          return true;
        },
      },
    };
    const trusting = secureContext;
    const isTls = protocol === 'https:';
    const socket = isTls ? openTls({ ...how, ...tlsOptions(url.origin, hostname) }) : openTcp(how);
    let remoteAddress: string | null = null;
    let handshaking = false;
    socket.once('connect', () => {
      remoteAddress = socket.remoteAddress ?? null;
      handshaking = isTls;
    });
    socket.once(isTls ? 'secureConnect' : 'connect', () => {
      handshaking = false;
      listener?.connected();
    });
    // A resumed session saves the receiver and us the costly half of the next handshake.
    socket.on('session', (session: Buffer) => {
      if (trusting === secureContext) putLatest(sessions, url.origin, session, TLS_SESSIONS_MAX);
    });
    // In TLS 1.3 a receiver that wants a certificate says so only when the handshake is over for us.
    socket.on('error', (error) => close((isTls && tlsError(error)) || error));
    // During a handshake an error follows.
    socket.on('end', () => handshaking || close(null));
    socket.on('close', () => close(null));
    return {
      remoteAddress: () => remoteAddress,
      write: (text) => socket.write(text),
      waitingBytes: () => socket.writableLength,
      destroy() {
        listener = undefined;
        socket.destroy();
      },
    };
  }

  function tlsOptions(origin: string, hostname: string) {
    const session = sessions.get(origin);
    return {
      secureContext,
      rejectUnauthorized: true, // whatever NODE_TLS_REJECT_UNAUTHORIZED says
      ALPNProtocols: ['http/1.1'],
      // RFC 6066, section 3: neither an address nor the final dot of a name is a server name.
      ...(isIP(hostname) === 0 && { servername: hostname.replace(/\.$/, '') }),
      ...(session && { session }),
    };
  }

  function guardedLookup(port: number, reputation: Reputation): LookupFunction {
    return (hostname, _options, callback) => {
      // A list is what `autoSelectFamily` asks for.
      judgedAddresses(hostname, port, reputation).then(
        (addresses) => callback(null, addresses),
        (error: AttemptError) => callback(error, []),
      );
    };
  }

  /** All addresses of the name, each of them allowed. Fails with an AttemptError. */
  async function judgedAddresses(
    hostname: string,
    port: number,
    reputation: Reputation,
  ): Promise<LookupAddress[]> {
    const addresses = await addressesOf(hostname, reputation);
    if (addresses.length === 0) throw new AttemptError('dns');
    if (!addresses.every(({ address }) => isAllowed(address, port)))
      throw new AttemptError('address_refused');
    return [...addresses];
  }

  async function addressesOf(hostname: string, reputation: Reputation): Promise<readonly LookupAddress[]> {
    const loopback = loopbackOf(hostname, allowedCidrs);
    if (loopback?.length === 0) throw new AttemptError('address_refused');
    if (loopback !== undefined) return loopback.map((address) => ({ address, family: isIP(address) }));
    return resolve(hostname, reputation).catch((error: unknown) => {
      throw new AttemptError('dns', { cause: error });
    });
  }

  function isAllowed(address: string, port: number): boolean {
    if (isInside(address, allowedCidrs)) return true;
    const isOwn = listeners.some((isAt) => isAt(address, port));
    return !isOwn && judgeAddress(address, []) === 'allowed';
  }
}

/** Made once and kept: parsing the roots takes 40 ms, a context of the built-in ones 0.3 ms. */
function secureContextOf(caPem: string | null): SecureContext {
  return createSecureContext(caPem === null ? {} : { ca: [...getCACertificates('default'), caPem] });
}

function interfaceAddresses(): string[] {
  return Object.values(networkInterfaces()).flatMap((list) => list?.map(({ address }) => address) ?? []);
}

/** Whether a connection to this address and port may end at the listener. */
type Listener = (ip: string, port: number) => boolean;

function listenerOf(listen: ListenAddress, machineAddresses: () => readonly string[]): Listener {
  const own = listenedAddress(listen.host);
  // Asked anew each time: a machine's addresses change. Which of them a name stands for is not asked.
  const isAt = (ip: string) => (own === null ? machineAddresses().includes(ip) : isInside(ip, [own]));
  return (ip, port) => (listen.port === port || listen.port === 0) && isAt(ip);
}

/** Words for people, the same in each version of OpenSSL and Node, for what is met in practice. */
const TLS_PROBLEMS: Record<string, string> = {
  CERT_HAS_EXPIRED: 'certificate has expired',
  CERT_NOT_YET_VALID: 'certificate is not yet valid',
  CERT_REVOKED: 'certificate is revoked',
  CERT_SIGNATURE_FAILURE: 'certificate has a wrong signature',
  DEPTH_ZERO_SELF_SIGNED_CERT: 'certificate is self-signed',
  ERR_TLS_CERT_ALTNAME_INVALID: 'certificate is for another host',
  ERR_SSL_PACKET_LENGTH_TOO_LONG: 'the receiver does not speak TLS',
  ERR_SSL_WRONG_VERSION_NUMBER: 'the receiver does not speak TLS',
  INVALID_PURPOSE: 'certificate is not for servers',
  SELF_SIGNED_CERT_IN_CHAIN: 'certificate is from an unknown authority',
  UNABLE_TO_GET_ISSUER_CERT: 'certificate is from an unknown authority',
  UNABLE_TO_GET_ISSUER_CERT_LOCALLY: 'certificate is from an unknown authority',
  UNABLE_TO_VERIFY_LEAF_SIGNATURE: 'certificate is from an unknown authority or its chain is incomplete',
};

/** The error of a failed handshake; undefined if the connection broke for reasons below TLS. */
function tlsError(error: NodeJS.ErrnoException & { reason?: string }): AttemptError | undefined {
  const { code = '', reason, syscall } = error;
  const problem = TLS_PROBLEMS[code] ?? reason;
  if (problem !== undefined) return new AttemptError(`tls: ${problem}`, { cause: error });
  if (syscall !== undefined || code === 'ECONNRESET' || code === '') return undefined;
  return new AttemptError(`tls: ${code.toLowerCase().replaceAll('_', ' ')}`, { cause: error });
}
