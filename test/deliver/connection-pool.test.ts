import t from 'tap';
import type { SocketEvents } from '../../src/deliver/connect.ts';
import { type Connection, createConnectionPool } from '../../src/deliver/connection-pool.ts';
import { collectGarbage } from '../../src/memory.ts';
import { fakeEffects } from '../helpers/effects.ts';

const PLACE = { url: new URL('https://example.com/hook'), origin: 'https://example.com' };

t.test('the connection used last is used next, and the others age out', (t) => {
  const { pool, effects, sockets, acquire, looks } = setup();
  const [one, two] = [acquire(), acquire()];
  for (const connection of [one, two]) pool.release(connection, null);
  for (let used = 0; used < 5; used++) {
    effects.advance(1_000);
    t.equal(acquire(), two);
    pool.release(two, null);
  }
  t.strictSame(
    sockets.map(({ isOpen }) => isOpen),
    [false, true],
  );
  t.equal(looks(), 6, 'by one look a second, however many are released');
  t.not(one, two);
  t.end();
});

t.test('an idle connection is used up to its timeout and closed soon after', (t) => {
  const rows: [hintedMs: number | null, idleMs: number][] = [
    [null, 4_000],
    [9_000, 8_000],
    [1_001, 1],
    [86_400_000, 10_000],
  ];
  for (const [hintedMs, idleMs] of rows) {
    const { pool, effects, sockets, acquire } = setup();
    const first = acquire();
    pool.release(first, hintedMs);
    effects.advance(idleMs - 1);
    t.equal(acquire(), first);
    t.equal(first.reused, true);
    pool.release(first, hintedMs);
    effects.block(idleMs); // and nobody has looked yet
    t.not(acquire(), first);
    t.match(sockets, [{ isOpen: false }, { isOpen: true }]);
  }
  const { pool, effects, sockets, acquire } = setup();
  for (let round = 0; round < 2; round++) {
    pool.release(acquire(), null);
    effects.advance(5_000);
    t.equal(sockets[round]?.isOpen, false, 'by whoever looks, however often there was nothing to look at');
  }
  for (const hintedMs of [1_000, 0]) {
    pool.release(acquire(), hintedMs);
    t.equal(sockets.at(-1)?.isOpen, false, 'none that the receiver closes at once');
  }
  const [lasting, last] = [acquire(), acquire()];
  pool.release(lasting, 9_000);
  pool.release(last, null);
  effects.block(4_000);
  t.equal(acquire(), lasting, 'also behind others that were used later');
  t.end();
});

t.test('dropping a busy connection keeps the idle ones', (t) => {
  const { pool, sockets, acquire } = setup();
  const [one, two] = [acquire(), acquire()] as [Connection, Connection];
  for (const connection of [one, two]) pool.release(connection, null);
  t.strictSame([acquire(), acquire()], [two, one], 'each carries one request at a time');
  pool.release(one, null);
  pool.drop(two);
  t.equal(acquire(), one);
  pool.release(one, null);
  pool.close();
  t.strictSame(
    sockets.map(({ isOpen }) => isOpen),
    [false, false],
  );
  t.end();
});

t.test('a busy connection does not count as idle, however often it was', (t) => {
  const { pool, sockets, acquire } = setup(2);
  for (let used = 0; used < 10; used++) pool.release(acquire(), null);
  const busy = acquire();
  for (const connection of [acquire(), acquire()]) pool.release(connection, null);
  t.ok(sockets.every(({ isOpen }) => isOpen));
  pool.drop(busy);
  t.end();
});

t.test('nothing is kept of a receiver without connections', (t) => {
  const { pool, effects, sockets } = setup();
  const useAll = (round: number) => {
    for (let index = 0; index < 100; index++) {
      const origin = `https://${round}.${index}.example.com/${'x'.repeat(50_000)}`;
      const connection = pool.acquire({ ...PLACE, origin: Buffer.from(origin).toString() }, {} as never);
      pool.release(connection, null);
    }
    effects.advance(5_000);
    sockets.length = 0;
  };
  useAll(0);
  collectGarbage();
  const before = process.memoryUsage().heapUsed;
  for (let round = 1; round <= 5; round++) useAll(round);
  collectGarbage();
  const grownBytes = process.memoryUsage().heapUsed - before;
  t.ok(grownBytes < 2e6, `${grownBytes} of 25,000,000`);
  t.end();
});

t.test('a connection is used for five minutes at most, however busy', (t) => {
  const { pool, effects, sockets, acquire } = setup();
  const first = acquire();
  effects.advance(5 * 60_000);
  pool.release(first, null);
  t.equal(acquire(), first);
  effects.advance(1);
  pool.release(first, null);
  t.equal(sockets[0]?.isOpen, false);
  t.not(acquire(), first);
  t.end();
});

t.test('one to a receiver that leaves more than 64 KiB unread is not used again', (t) => {
  const { pool, sockets, acquire } = setup();
  const first = acquire();
  const [socket] = sockets as [Socket];
  socket.unsentBytes = 64 * 1024;
  pool.release(first, null);
  t.equal(acquire(), first);
  socket.unsentBytes += 1;
  pool.release(first, null);
  t.equal(socket.isOpen, false);
  t.end();
});

t.test('an idle connection that receives bytes or is closed is not used again', (t) => {
  for (const happen of [
    (hears: SocketEvents) => hears.received(Buffer.from('HTTP/1.1 500 Late')),
    (hears: SocketEvents) => hears.closed(null),
  ]) {
    const { pool, sockets, acquire } = setup();
    const first = acquire();
    const ended = () => t.fail('its exchange is over');
    first.send({ request: () => null, received: ended, closed: ended });
    pool.release(first, null);
    const [socket] = sockets;
    if (socket !== undefined) happen(socket.hears);
    t.equal(socket?.isOpen, false);
    t.not(acquire(), first);
  }
  t.end();
});

t.test('a request is made when its connection is established, and uses an established one at once', (t) => {
  const { pool, sockets, acquire } = setup();
  const connection = acquire();
  const exchange = {
    request: (isLate: boolean) => (isLate ? 'first, anew' : 'second'),
    received: () => undefined,
    closed: () => undefined,
  };
  connection.send(exchange);
  t.strictSame(sockets[0]?.written, []);
  sockets[0]?.hears.connected();
  t.strictSame(sockets[0]?.written, ['first, anew']);
  pool.release(connection, null);
  acquire().send(exchange);
  t.strictSame(sockets[0]?.written, ['first, anew', 'second']);
  t.end();
});

t.test(
  'idle connections are bounded: the one idle for longest is closed, and a dropped one is not used',
  (t) => {
    const { pool, sockets, acquire } = setup(2);
    const all = [acquire(), acquire(), acquire()];
    for (const connection of all) pool.release(connection, null);
    t.strictSame(
      sockets.map(({ isOpen }) => isOpen),
      [false, true, true],
    );
    pool.drop(all[1] as Connection);
    t.equal(acquire(), all[2]);
    pool.release(all[2] as Connection, null);
    pool.close();
    t.ok(sockets.every(({ isOpen }) => !isOpen));
    t.end();
  },
);

interface Socket {
  hears: SocketEvents;
  written: string[];
  unsentBytes: number;
  isOpen: boolean;
}

/** Connections whose sockets lead nowhere. */
function setup(idleMax = 10) {
  const effects = fakeEffects();
  const { after } = effects;
  let scheduled = 0;
  effects.after = (delayMs, action) => {
    scheduled += 1;
    return after(delayMs, action);
  };
  const sockets: Socket[] = [];
  const pool = createConnectionPool(
    (_, hears) => {
      const socket: Socket = { hears, written: [], unsentBytes: 0, isOpen: true };
      sockets.push(socket);
      return {
        remoteAddress: () => null,
        write: (text) => void socket.written.push(text),
        unsentBytes: () => socket.unsentBytes,
        destroy() {
          socket.isOpen = false;
        },
      };
    },
    idleMax,
    effects,
  );
  return { pool, effects, sockets, acquire: () => pool.acquire(PLACE, {} as never), looks: () => scheduled };
}
