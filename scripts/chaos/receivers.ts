import { createHmac, timingSafeEqual } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createServer, type IncomingHttpHeaders, type IncomingMessage, type ServerResponse } from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { AddressInfo, Server, Socket } from 'node:net';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { setTimeout as delay } from 'node:timers/promises';
import { createRandom, type Random } from './random.ts';

/** How a receiver treats some of its requests; `steady` and `slow-tls` answer all of them well. */
export const RECEIVER_KINDS = [
  'steady',
  'slow-tls',
  'server-error',
  'gone',
  'silent',
  'drip',
  'reset',
  'endless',
  'vanishing',
] as const;
type ReceiverKind = (typeof RECEIVER_KINDS)[number];

/** Those that may close their port for a while, by index in RECEIVER_KINDS. */
export const VANISHING = RECEIVER_KINDS.map((_, index) => index).filter((index) => index >= 2);

/** The share of its requests that each kind treats badly; `gone` disables the webhook each time. */
const BAD_SHARE: Record<ReceiverKind, number> = {
  steady: 0,
  'slow-tls': 0,
  'server-error': 0.35,
  gone: 0.004,
  silent: 0.1,
  drip: 0.15,
  reset: 0.3,
  endless: 0.3,
  vanishing: 0,
};

/** How long `slow-tls` waits before it begins the handshake. */
const HANDSHAKE_DELAY_MS = 80;
const DRIP_EVERY_MS = 250;

/** An event as one webhook received it, over all requests for it. */
interface Reception {
  body: string;
  requests: number;
  /** Whether at least one was answered with a whole 2xx status line. */
  acknowledged: boolean;
}

/** What one webhook, which has a path of its own, has received. */
export interface Inbox {
  receiver: ReceiverKind;
  events: Map<string, Reception>;
  /** Whether davit was answered 410. */
  answeredGone: boolean;
  /** Whether it may have missed something, as it answered badly or was away. */
  misbehaved: boolean;
}

/** A request whose signatures are still to be checked: the secret may not be known yet. */
export interface Unverified {
  path: string;
  headers: IncomingHttpHeaders;
  body: string;
}

export interface Receivers {
  /** A URL for a new webhook, with a new path. */
  newUrl(receiver: number): { url: string; path: string };
  inboxes: ReadonlyMap<string, Inbox>;
  /** Returns the requests since the last call. */
  takeUnverified(): Unverified[];
  /** Closes the port and all connections of a receiver for `forMs`. */
  vanish(receiver: number, forMs: number): Promise<void>;
  /** From now on all receivers are there and answer well. */
  heal(): Promise<void>;
  requests(): number;
  close(): Promise<void>;
}

/** Certificates of the tests, for `localhost`. */
const TLS = join(import.meta.dirname, '../../test/fixtures/tls');
export const CA_FILE = join(TLS, 'ca.pem');

/** Starts a real receiver of each kind on loopback; `seed` decides which requests are treated badly. */
export async function startReceivers(seed: number): Promise<Receivers> {
  const inboxes = new Map<string, Inbox>();
  let unverified: Unverified[] = [];
  let requests = 0;
  let paths = 0;
  let healed = false;
  const receivers = await Promise.all(
    RECEIVER_KINDS.map((kind) =>
      startReceiver(kind, (request, response, random) => receive(kind, request, response, random), seed),
    ),
  );

  return {
    newUrl(index) {
      const receiver = at(index);
      paths += 1;
      const path = `/${receiver.kind}/${paths}`;
      inboxes.set(path, {
        receiver: receiver.kind,
        events: new Map(),
        answeredGone: false,
        misbehaved: false,
      });
      return { url: `${receiver.origin()}${path}`, path };
    },
    inboxes,
    takeUnverified() {
      const taken = unverified;
      unverified = [];
      return taken;
    },
    async vanish(index, forMs) {
      const receiver = at(index);
      for (const inbox of inboxes.values()) if (inbox.receiver === receiver.kind) inbox.misbehaved = true;
      await receiver.close();
      await delay(forMs);
      await receiver.open();
    },
    async heal() {
      healed = true;
      await Promise.all(receivers.map((receiver) => receiver.open()));
    },
    requests: () => requests,
    async close() {
      await Promise.all(receivers.map((receiver) => receiver.close()));
    },
  };

  function at(index: number) {
    const receiver = receivers[index];
    if (receiver === undefined) throw new Error(`there is no receiver ${index}`);
    return receiver;
  }

  async function receive(
    kind: ReceiverKind,
    request: IncomingMessage,
    response: ServerResponse,
    random: Random,
  ): Promise<void> {
    const body = await text(request).catch(() => undefined);
    if (body === undefined) return; // the sender went away before the end
    requests += 1;
    const path = request.url ?? '';
    unverified.push({ path, headers: request.headers, body });
    const inbox = inboxes.get(path);
    if (inbox === undefined) {
      response.writeHead(404).end();
      return;
    }
    const { id, type } = JSON.parse(body) as { id: string; type: string };
    const isBad = !healed && random.chance(BAD_SHARE[kind]);
    if (isBad) inbox.misbehaved = true;
    const reception = inbox.events.get(id) ?? { body, requests: 0, acknowledged: false };
    reception.requests += 1;
    // davit does not store pings.
    if (type !== 'ping') inbox.events.set(id, reception);
    if (isBad) {
      if (kind === 'gone') inbox.answeredGone = true;
      await treatBadly(kind, response, random, reception);
      return;
    }
    reception.acknowledged = true;
    response.writeHead(204).end();
  }
}

async function treatBadly(
  kind: ReceiverKind,
  response: ServerResponse,
  random: Random,
  reception: Reception,
): Promise<void> {
  switch (kind) {
    case 'steady':
    case 'slow-tls':
    case 'vanishing':
      return;
    case 'server-error':
      response.writeHead(random.pick([500, 502, 404, 301]), { Location: 'http://127.0.0.1:1/' }).end('no');
      return;
    case 'gone':
      response.writeHead(410).end();
      return;
    case 'silent':
      return;
    case 'drip':
      return await drip(response, reception);
    case 'reset':
      response.socket?.resetAndDestroy();
      return;
    case 'endless': {
      const piece = Buffer.alloc(4096, 'x');
      const pour = () => {
        while (!response.destroyed && response.write(piece));
      };
      reception.acknowledged = true;
      response.writeHead(200).on('drain', pour);
      pour();
      return;
    }
    default:
      kind satisfies never;
  }
}

/** Answers so slowly that davit gives up before the end, unless it was frozen meanwhile. */
async function drip(response: ServerResponse, reception: Reception): Promise<void> {
  const { socket } = response;
  for (const letter of 'HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n') {
    if (socket === null || socket.destroyed) return;
    socket.write(letter);
    await delay(DRIP_EVERY_MS);
  }
  reception.acknowledged = true;
}

async function startReceiver(
  kind: ReceiverKind,
  receive: (request: IncomingMessage, response: ServerResponse, random: Random) => Promise<void>,
  seed: number,
) {
  const random = createRandom(`receiver ${kind} ${seed}`);
  const sockets = new Set<Socket>();
  const hear = (request: IncomingMessage, response: ServerResponse) => {
    response.on('error', () => undefined);
    void receive(request, response, random).catch(() => response.destroy());
  };
  const server: Server =
    kind === 'slow-tls'
      ? createTlsServer(
          { cert: readFileSync(join(TLS, 'localhost.pem')), key: readFileSync(join(TLS, 'localhost.key')) },
          hear,
        )
      : createServer(hear);
  if (kind === 'slow-tls') delayHandshakes(server);
  server.on('connection', (socket: Socket) => {
    sockets.add(socket);
    socket.on('error', () => undefined).on('close', () => sockets.delete(socket));
  });
  let port = 0;
  await open();
  return { kind, origin, open, close };

  function origin(): string {
    return kind === 'slow-tls' ? `https://localhost:${port}` : `http://127.0.0.1:${port}`;
  }

  async function open(): Promise<void> {
    // An outgoing connection of another process may have taken the port meanwhile.
    for (let tries = 0; !server.listening; tries += 1) {
      const problem = await listen();
      if (problem === undefined) break;
      if (tries > 100) throw problem;
      await delay(100);
    }
    port = (server.address() as AddressInfo).port;
  }

  function listen(): Promise<Error | undefined> {
    return new Promise((resolve) => {
      const fail = (error: Error) => resolve(error);
      server.once('error', fail);
      server.listen(port, '127.0.0.1', () => {
        server.off('error', fail);
        resolve(undefined);
      });
    });
  }

  async function close(): Promise<void> {
    if (!server.listening) return;
    const closed = new Promise((resolve) => server.close(resolve));
    for (const socket of sockets) socket.destroy();
    await closed;
  }
}

/** Makes every connection wait before the TLS handshake. */
function delayHandshakes(server: Server): void {
  const [begin] = server.listeners('connection') as ((socket: Socket) => void)[];
  server.removeAllListeners('connection');
  server.on('connection', (socket: Socket) => {
    void delay(HANDSHAKE_DELAY_MS).then(() => {
      if (!socket.destroyed) begin?.call(server, socket);
    });
  });
}

/**
 * What is wrong with the signatures of a delivery, given `secrets`; undefined: nothing. Written from the specification
 * and Standard Webhooks, not from davit's own code.
 */
export function signatureProblem(
  { headers, body }: Pick<Unverified, 'headers' | 'body'>,
  secrets: readonly string[],
): string | undefined {
  const [, at = '', digests = ''] =
    /^t=(\d+)((?:,v1=[0-9a-f]{64})+)$/.exec(String(headers['service-signature'])) ?? [];
  if (at === '') return `Service-Signature has another form: ${headers['service-signature']}`;
  const given = digests.split(',v1=').slice(1);
  const expected = secrets.map((secret) =>
    createHmac('sha256', secret).update(`${at}.${body}`).digest('hex'),
  );
  if (!expected.some((digest) => given.some((other) => equal(digest, other)))) {
    return 'no v1 of Service-Signature fits any secret that was given out';
  }
  const id = headers['webhook-id'];
  if (id !== (JSON.parse(body) as { id: string }).id) return `webhook-id is ${id}, not the event's`;
  const standard = String(headers['webhook-signature']).split(' ');
  const standardExpected = secrets.map((secret) => {
    const key = Buffer.from(secret.replace(/^whsec_/, ''), 'base64');
    const signed = `${id}.${headers['webhook-timestamp']}.${body}`;
    return `v1,${createHmac('sha256', key).update(signed).digest('base64')}`;
  });
  return standardExpected.some((signature) => standard.some((other) => equal(signature, other)))
    ? undefined
    : 'no part of webhook-signature fits any secret that was given out';
}

function equal(one: string, other: string): boolean {
  return one.length === other.length && timingSafeEqual(Buffer.from(one), Buffer.from(other));
}
