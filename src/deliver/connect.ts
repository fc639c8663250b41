import { isIP, connect as openTcp } from 'node:net';
import {
  createSecureContext,
  DEFAULT_CIPHERS,
  getCACertificates,
  connect as openTls,
  type SecureContext,
  TLSSocket,
} from 'node:tls';
import { hostnameOf } from '../address.ts';
import { HOUR_MS } from '../durations.ts';
import { type Effects, LONGEST_TIMER_MS } from '../effects.ts';
import { putLatest } from '../latest.ts';
import { createAddressGuard, type GuardOptions } from './address-guard.ts';
import { AttemptError } from './attempt-error.ts';
import type { Owner } from './key-shares.ts';

export interface ConnectorOptions extends GuardOptions {
  /** How long establishing a connection may take at most; the caller may give up earlier. */
  timeoutMs: number;
  /** Certificates in PEM that are trusted besides the default ones. */
  caPem?: string | null;
}

export interface Connector {
  connect: Connect;
  /** Replaces `caPem` for new connections. */
  trust(caPem: string): void;
}

/** Opens a connection to the host of a URL, over TLS for `https:`, for a webhook of `key`. */
export type Connect = (url: URL, events: SocketEvents, key: Owner) => OpenSocket;

interface OpenSocket {
  /** The one that was tried last, and to which it is connected; null until one was tried. */
  remoteAddress(): string | null;
  /** Call this only once it is connected. */
  write(text: string): void;
  /** How much of what was written is still buffered in this process. Over TLS it decreases with a delay. */
  unsentBytes(): number;
  /** Closes the connection, or stops connecting. There are no events after this. */
  destroy(): void;
}

/** The events of a connection, of which none comes before `connect` has returned. */
export interface SocketEvents {
  /** It may be written to; over TLS, the certificate was verified. */
  connected(): void;
  /** `bytes` is valid only during the call: the next read of any connection overwrites it. */
  received(bytes: Buffer): void;
  /** The last event: no more can arrive. Null: the receiver closed the connection without an error. */
  closed(error: Error | null): void;
}

const TLS_SESSIONS_MAX = 1_000;

/** A resumed session does not show the receiver's certificate again: after this time it is verified anew. */
const TLS_SESSION_MAX_AGE_MS = HOUR_MS;

interface TlsSession {
  ticket: Buffer;
  /** When the receiver's certificate was verified, on the monotonic clock. */
  verifiedAtMs: number;
}

/** The read buffer of all connections: what one read brings is processed before the next. */
const received = Buffer.allocUnsafeSlow(64 * 1024);

/**
 * How many sessions and keys a receiver may bring for one request: they are no part of the answer, and one that sent
 * them without end took 89 % of the thread. A handshake brings five keys at most, an update of keys one or two; servers
 * give one or two sessions.
 */
const TLS_EXTRAS_MAX = 16;

/**
 * Of an answer, of which 40 KiB at most are read, see send.ts and answer.ts: more pieces are tiny ones. Two receivers
 * that answered in records of one byte held up every other delivery for 1.6 s.
 */
const PIECES_MAX = 1024;

/** Connects only to allowed addresses, see address-guard.ts. */
export function createConnector(options: ConnectorOptions, effects: Effects): Connector {
  const { timeoutMs } = options;
  const guard = createAddressGuard(options, effects);
  let { caPem = null } = options;
  let secureContext = secureContextOf(caPem);
  const sessions = new Map<string, TlsSession>();

  return {
    connect,
    trust(renewedPem) {
      // A context takes 1.2 MB that V8 does not count, so it collects them late: after 700 reloads, there were 700 MB.
      if (renewedPem === caPem) return;
      caPem = renewedPem;
      secureContext = secureContextOf(caPem);
      // A resumed session would not verify the receiver's certificate again.
      sessions.clear();
    },
  };

  function connect(url: URL, events: SocketEvents, key: Owner): OpenSocket {
    const isTls = url.protocol === 'https:';
    const hostname = hostnameOf(url);
    const port = Number(url.port || (isTls ? 443 : 80));
    const refusal = isIP(hostname) === 0 ? null : guard.literalRefusal(hostname, port);
    if (refusal !== null) return refusedSocket(refusal, events);
    let handlers: SocketEvents | undefined = events;
    const close = (error: Error | null) => {
      handlers?.closed(error);
      handlers = undefined;
    };
    /** What came since the last request. */
    let pieces = 0;
    const socketOptions = {
      host: hostname,
      port,
      lookup: guard.lookupFor(port, key),
      noDelay: true,
      autoSelectFamily: true,
      // The default of 250 ms gives up on addresses that are merely far away. The last address gets all remaining time.
      autoSelectFamilyAttemptTimeout: Math.min(Math.max(250, Math.floor(timeoutMs / 5)), LONGEST_TIMER_MS),
      onread: {
        buffer: received,
        callback(length: number) {
          pieces += 1;
          if (pieces > PIECES_MAX) refuse();
          handlers?.received(received.subarray(0, length));
          return true;
        },
      },
    };
    const contextAtStart = secureContext;
    const offered = isTls ? sessionOf(url.origin) : undefined;
    const socket = isTls
      ? openTls({ ...socketOptions, ...tlsOptions(hostname, offered) })
      : openTcp(socketOptions);
    let remoteAddress: string | null = null;
    let handshaking = false;
    // Not read from the socket, which has none if nobody answers there.
    socket.on('connectionAttempt', (address: string) => {
      remoteAddress = address;
    });
    socket.once('connect', () => {
      handshaking = isTls;
    });
    socket.once(isTls ? 'secureConnect' : 'connect', () => {
      handshaking = false;
      handlers?.connected();
    });
    const refuse = () => {
      close(new AttemptError('invalid_response'));
      socket.destroy();
    };
    let extraCount = 0;
    const countExtra = () => {
      extraCount += 1;
      if (extraCount > TLS_EXTRAS_MAX) refuse();
    };
    // The only event of a key update. It comes with each key; the key itself is not looked at.
    socket.on('keylog', countExtra);
    // Resuming the session saves both sides the costly half of the next handshake.
    socket.on('session', (ticket: Buffer) => {
      countExtra();
      if (socket.destroyed || contextAtStart !== secureContext) return;
      const isResumed = socket instanceof TLSSocket && socket.isSessionReused();
      const verifiedAtMs = (isResumed ? offered?.verifiedAtMs : undefined) ?? effects.monotonicMs();
      putLatest(sessions, url.origin, { ticket, verifiedAtMs }, TLS_SESSIONS_MAX);
    });
    // Also after the handshake: in TLS 1.3, a receiver that requires a client certificate reports it only then.
    socket.on('error', (problems) => {
      // Of the address that was tried last.
      const error = problems instanceof AggregateError ? (problems.errors.at(-1) as Error) : problems;
      const problem = isTls ? tlsError(error) : undefined;
      // A receiver that cannot resume the session would fail at each further attempt: RFC 5246, section 7.2.2.
      if (handshaking || problem !== undefined) sessions.delete(url.origin);
      close(problem ?? error);
    });
    // During a handshake, 'error' follows.
    socket.on('end', () => handshaking || close(null));
    socket.on('close', () => close(null));
    return {
      remoteAddress: () => remoteAddress,
      write(text) {
        extraCount = 0;
        pieces = 0;
        socket.write(text);
      },
      unsentBytes: () => socket.writableLength,
      destroy() {
        handlers = undefined;
        // The handshake may have hung, and with the same session it would again.
        if (handshaking) sessions.delete(url.origin);
        socket.destroy();
      },
    };
  }

  /** What may be resumed; undefined: the handshake is to show the receiver's certificate. */
  function sessionOf(origin: string): TlsSession | undefined {
    const session = sessions.get(origin);
    const isFresh =
      session !== undefined && effects.monotonicMs() - session.verifiedAtMs < TLS_SESSION_MAX_AGE_MS;
    return isFresh ? session : undefined;
  }

  function tlsOptions(hostname: string, session: TlsSession | undefined) {
    return {
      secureContext,
      rejectUnauthorized: true, // whatever NODE_TLS_REJECT_UNAUTHORIZED says
      ALPNProtocols: ['http/1.1'],
      // RFC 6066, section 3: neither an address nor the final dot of a name is a server name.
      ...(isIP(hostname) === 0 && { servername: hostname.replace(/\.$/, '') }),
      ...(session && { session: session.ticket }),
    };
  }
}

/** In place of a connection to an address that is not allowed: only its end. */
function refusedSocket(refusal: Error, events: SocketEvents): OpenSocket {
  let isDestroyed = false;
  queueMicrotask(() => isDestroyed || events.closed(refusal));
  return {
    remoteAddress: () => null,
    write() {},
    unsentBytes: () => 0,
    destroy: () => (isDestroyed = true),
  };
}

/**
 * Made once, not for each connection: parsing the roots takes 40 ms, a context of the built-in ones 0.3 ms. Without DHE,
 * whose group the receiver chooses: one of 10,000 bits blocks the thread for 0.65 s. With renegotiations, in which a
 * receiver on TLS 1.2 asks for a client certificate that it can do without; refusing them without end is no cheaper.
 */
function secureContextOf(caPem: string | null): SecureContext {
  return createSecureContext({
    ciphers: `${DEFAULT_CIPHERS}:!kDHE`,
    ...(caPem !== null && { ca: [...getCACertificates('default'), caPem] }),
  });
}

/** Readable texts for the errors met in practice, the same for every version of OpenSSL and Node. */
const TLS_PROBLEMS: Record<string, string> = {
  CERT_HAS_EXPIRED: 'certificate has expired',
  CERT_NOT_YET_VALID: 'certificate is not yet valid',
  CERT_REVOKED: 'certificate is revoked',
  CERT_SIGNATURE_FAILURE: 'certificate has a wrong signature',
  DEPTH_ZERO_SELF_SIGNED_CERT: 'certificate is self-signed',
  ERR_TLS_CERT_ALTNAME_INVALID: 'certificate is for another host',
  'ERR_SSL_SSL/TLS_ALERT_HANDSHAKE_FAILURE':
    'handshake failure: the receiver may require a client certificate, or other ciphers',
  ERR_SSL_PACKET_LENGTH_TOO_LONG: 'the receiver does not speak TLS',
  ERR_SSL_TLSV13_ALERT_CERTIFICATE_REQUIRED: 'the receiver requires a client certificate',
  ERR_SSL_TLSV1_ALERT_PROTOCOL_VERSION: 'the receiver speaks no TLS 1.2 or newer',
  ERR_SSL_UNSUPPORTED_PROTOCOL: 'the receiver speaks no TLS 1.2 or newer',
  ERR_SSL_WRONG_VERSION_NUMBER: 'the receiver does not speak TLS',
  INVALID_PURPOSE: 'certificate is not for servers',
  SELF_SIGNED_CERT_IN_CHAIN: 'certificate is from an unknown authority',
  UNABLE_TO_GET_ISSUER_CERT: 'certificate is from an unknown authority',
  UNABLE_TO_GET_ISSUER_CERT_LOCALLY: 'certificate is from an unknown authority',
  UNABLE_TO_VERIFY_LEAF_SIGNATURE: 'certificate is from an unknown authority or its chain is incomplete',
};

/** The error of a failed handshake; undefined if the connection broke for reasons below TLS. */
function tlsError(error: NodeJS.ErrnoException & { reason?: string }): AttemptError | undefined {
  const { code = '', reason, syscall, message } = error;
  // Node's code for every certificate that OpenSSL refuses for a rarer reason, such as a key that is too weak.
  const problem = TLS_PROBLEMS[code] ?? reason ?? (code === 'UNSPECIFIED' ? message : undefined);
  if (problem !== undefined) return new AttemptError(`tls: ${problem}`, { cause: error });
  const isBelowTls = syscall !== undefined || code === 'ECONNRESET';
  if (isBelowTls || code === '') return undefined;
  return new AttemptError(`tls: ${code.toLowerCase().replaceAll('_', ' ')}`, { cause: error });
}
