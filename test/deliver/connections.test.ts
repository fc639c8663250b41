import t from 'tap';
import type { SocketEvents } from '../../src/deliver/connect.ts';
import { type Connection, createConnections } from '../../src/deliver/connections.ts';
import { collectGarbage } from '../../src/memory.ts';
import { fakeEffects } from '../helpers/effects.ts';

const PLACE = { url: new URL('https://example.com/hook'), origin: 'https://example.com' };

t.test('the connection that was used last is used next, and the others go out of use', (t) => {
  const { connections, effects, sockets, take } = setup();
  const [one, two] = [take(), take()];
  for (const connection of [one, two]) connections.giveBack(connection, null);
  for (let used = 0; used < 5; used++) {
    effects.advance(1_000);
    t.equal(take(), two);
    connections.giveBack(two, null);
  }
  t.strictSame(
    sockets.map(({ isOpen }) => isOpen),
    [false, true],
  );
  t.not(one, two);
  t.end();
});

t.test('an idle connection is used up to its time, and closed soon after', (t) => {
  const rows: [hintedMs: number | null, idleMs: number][] = [
    [null, 4_000],
    [31_000, 30_000],
    [1_001, 1],
    [86_400_000, 60_000],
  ];
  for (const [hintedMs, idleMs] of rows) {
    const { connections, effects, sockets, take } = setup();
    const first = take();
    connections.giveBack(first, hintedMs);
    effects.advance(idleMs - 1);
    t.equal(take(), first);
    t.equal(first.reused, true);
    connections.giveBack(first, hintedMs);
    effects.block(idleMs); // and nobody has looked yet
    t.not(take(), first);
    t.match(sockets, [{ isOpen: false }, { isOpen: true }]);
  }
  const { connections, effects, sockets, take } = setup();
  for (let round = 0; round < 2; round++) {
    connections.giveBack(take(), null);
    effects.advance(5_000);
    t.equal(sockets[round]?.isOpen, false, 'by whoever looks, however often there was nothing to look at');
  }
  for (const hintedMs of [1_000, 0]) {
    connections.giveBack(take(), hintedMs);
    t.equal(sockets.at(-1)?.isOpen, false, 'none that the receiver closes at once');
  }
  t.end();
});

t.test('one that is dropped while it is busy takes no idle one along', (t) => {
  const { connections, sockets, take } = setup();
  const [one, two] = [take(), take()] as [Connection, Connection];
  for (const connection of [one, two]) connections.giveBack(connection, null);
  t.strictSame([take(), take()], [two, one], 'each carries one request at a time');
  connections.giveBack(one, null);
  connections.drop(two);
  t.equal(take(), one);
  connections.giveBack(one, null);
  connections.close();
  t.strictSame(
    sockets.map(({ isOpen }) => isOpen),
    [false, false],
  );
  t.end();
});

t.test('one that is busy does not count as idle, however often it was', (t) => {
  const { connections, sockets, take } = setup(2);
  for (let used = 0; used < 10; used++) connections.giveBack(take(), null);
  const busy = take();
  for (const connection of [take(), take()]) connections.giveBack(connection, null);
  t.ok(sockets.every(({ isOpen }) => isOpen));
  connections.drop(busy);
  t.end();
});

t.test('nothing is kept of a receiver that has no connection any more', (t) => {
  const { connections, effects, sockets } = setup();
  const useAll = (round: number) => {
    for (let index = 0; index < 100; index++) {
      const origin = `https://${round}.${index}.example.com/${'x'.repeat(50_000)}`;
      const connection = connections.take({ ...PLACE, origin: Buffer.from(origin).toString() }, {} as never);
      connections.giveBack(connection, null);
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

t.test('a connection serves for five minutes, however busy', (t) => {
  const { connections, effects, sockets, take } = setup();
  const first = take();
  effects.advance(5 * 60_000);
  connections.giveBack(first, null);
  t.equal(take(), first);
  effects.advance(1);
  connections.giveBack(first, null);
  t.equal(sockets[0]?.isOpen, false);
  t.not(take(), first);
  t.end();
});

t.test('one that stands idle and says something, or is closed, is not used again', (t) => {
  for (const happen of [
    (hears: SocketEvents) => hears.received(Buffer.from('HTTP/1.1 500 Late')),
    (hears: SocketEvents) => hears.closed(null),
  ]) {
    const { connections, sockets, take } = setup();
    const first = take();
    connections.giveBack(first, null);
    const [socket] = sockets;
    if (socket !== undefined) happen(socket.hears);
    t.equal(socket?.isOpen, false);
    t.not(take(), first);
  }
  t.end();
});

t.test('a request waits for its connection, one that is connected takes it at once', (t) => {
  const { connections, sockets, take } = setup();
  const connection = take();
  const nothing = { received: () => undefined, closed: () => undefined };
  connection.send('first', nothing);
  t.strictSame(sockets[0]?.written, []);
  sockets[0]?.hears.connected();
  t.strictSame(sockets[0]?.written, ['first']);
  connections.giveBack(connection, null);
  take().send('second', nothing);
  t.strictSame(sockets[0]?.written, ['first', 'second']);
  t.end();
});

t.test(
  'so many stand idle, and the one that stood longest makes room; one that is dropped is not used',
  (t) => {
    const { connections, sockets, take } = setup(2);
    const all = [take(), take(), take()];
    for (const connection of all) connections.giveBack(connection, null);
    t.strictSame(
      sockets.map(({ isOpen }) => isOpen),
      [false, true, true],
    );
    connections.drop(all[1] as Connection);
    t.equal(take(), all[2]);
    connections.giveBack(all[2] as Connection, null);
    connections.close();
    t.ok(sockets.every(({ isOpen }) => !isOpen));
    t.end();
  },
);

interface Socket {
  hears: SocketEvents;
  written: string[];
  isOpen: boolean;
}

/** Connections whose sockets lead nowhere. */
function setup(idleMax = 10) {
  const effects = fakeEffects();
  const sockets: Socket[] = [];
  const connections = createConnections(
    (_, hears) => {
      const socket: Socket = { hears, written: [], isOpen: true };
      sockets.push(socket);
      return {
        remoteAddress: () => null,
        write: (text) => void socket.written.push(text),
        waitingBytes: () => 0,
        destroy() {
          socket.isOpen = false;
        },
      };
    },
    idleMax,
    effects,
  );
  return { connections, effects, sockets, take: () => connections.take(PLACE, {} as never) };
}
