import t from 'tap';
import { addressGroup, createClientAddress } from '../../src/http/client-address.ts';
import { cidr } from '../helpers/cidr.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { requestJson, startHttp } from '../helpers/http.ts';

t.test('failures are counted by IPv4 address, also if mapped into IPv6, or by IPv6 /64', (t) => {
  const rows: [address: string, group: string][] = [
    ['192.0.2.1', '192.0.2.1'],
    ['::ffff:192.0.2.1', '192.0.2.1'],
    ['::ffff:c000:201', '192.0.2.1'],
    ['2001:db8:1:2:3:4:5:6', '2001:db8:1:2::/64'],
    ['2001:0DB8:0001:0002::', '2001:db8:1:2::/64'],
    ['2001:db8:1:3::1', '2001:db8:1:3::/64'],
    ['::1', '::/64'],
    ['fe80::1%br-abc', 'fe80::/64'],
    ['fe80::1%eth0.10', 'fe80::/64'],
    ['unknown', 'unknown'],
  ];
  for (const [address, group] of rows) t.equal(addressGroup(address), group, address);
  t.end();
});

t.test('the client is the last address in X-Forwarded-For that is no trusted proxy', (t) => {
  const rows: { socket: string; forwardedFor?: string; trusted: string[]; client: string }[] = [
    { socket: '192.0.2.1', trusted: [], client: '192.0.2.1' },
    { socket: '::ffff:192.0.2.1', trusted: [], client: '192.0.2.1' },
    { socket: '192.0.2.1', forwardedFor: '198.51.100.7', trusted: [], client: '192.0.2.1' },
    { socket: '192.0.2.1', forwardedFor: '198.51.100.7', trusted: ['10.0.0.0/8'], client: '192.0.2.1' },
    { socket: '10.0.0.1', forwardedFor: '198.51.100.7', trusted: ['10.0.0.0/8'], client: '198.51.100.7' },
    {
      socket: '::ffff:10.0.0.1',
      forwardedFor: '198.51.100.7',
      trusted: ['10.0.0.0/8'],
      client: '198.51.100.7',
    },
    {
      socket: '10.0.0.1',
      forwardedFor: '203.0.113.9, 198.51.100.7',
      trusted: ['10.0.0.0/8'],
      client: '198.51.100.7',
    },
    {
      socket: '10.0.0.1',
      forwardedFor: '198.51.100.7, 10.9.9.9 ,10.0.0.2',
      trusted: ['10.0.0.0/8'],
      client: '198.51.100.7',
    },
    { socket: '10.0.0.1', forwardedFor: '10.0.0.3, 10.0.0.2', trusted: ['10.0.0.0/8'], client: '10.0.0.3' },
    {
      socket: '10.0.0.1',
      forwardedFor: '198.51.100.7:4711',
      trusted: ['10.0.0.0/8'],
      client: '198.51.100.7',
    },
    {
      socket: '10.0.0.1',
      forwardedFor: '[2001:DB8::7]:4711',
      trusted: ['10.0.0.0/8'],
      client: '2001:db8::7',
    },
    { socket: '10.0.0.1', forwardedFor: '2001:db8::7', trusted: ['10.0.0.0/8'], client: '2001:db8::7' },
    { socket: 'fd00::1', forwardedFor: '198.51.100.7', trusted: ['fd00::/8'], client: '198.51.100.7' },
    { socket: '10.0.0.1', forwardedFor: 'unknown', trusted: ['10.0.0.0/8'], client: '10.0.0.1' },
    {
      socket: '10.0.0.1',
      forwardedFor: '198.51.100.7, 0x0a000002',
      trusted: ['10.0.0.0/8'],
      client: '10.0.0.1',
    },
    { socket: '10.0.0.1', forwardedFor: '', trusted: ['10.0.0.0/8'], client: '10.0.0.1' },
    { socket: '10.0.0.1', trusted: ['10.0.0.0/8'], client: '10.0.0.1' },
  ];
  for (const { socket, forwardedFor, trusted, client } of rows) {
    const clientAddress = createClientAddress(trusted.map(cidr));
    const headers = forwardedFor === undefined ? {} : { 'x-forwarded-for': forwardedFor };
    const raw = { req: { socket: { remoteAddress: socket }, headers }, res: {} };
    t.equal(clientAddress({ raw } as never), client, JSON.stringify({ socket, forwardedFor, trusted }));
  }
  t.end();
});

t.test('behind a trusted proxy, failed authentications are counted by client', async (t) => {
  const { port } = await startHttp(t, {
    effects: fakeEffects(),
    trustedProxies: [cidr('127.0.0.1')],
    resources: () => [
      {
        name: 'open',
        register: (server) => server.route({ method: 'GET', path: '/v2/open', handler: () => ({}) }),
      },
    ],
  });
  const statusFrom = async (address: string) =>
    (await requestJson(port, 'GET', '/v2/open', { headers: { 'x-forwarded-for': address } })).status;
  for (let attempt = 0; attempt < 60; attempt++) await statusFrom(`2001:db8::${attempt}`);
  t.equal(await statusFrom('2001:db8::ffff'), 429);
  t.equal(await statusFrom('2001:db8:0:1::1'), 401);
});
