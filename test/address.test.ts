import { readFileSync } from 'node:fs';
import fc from 'fast-check';
import ipaddr from 'ipaddr.js';
import t from 'tap';
import {
  type Cidr,
  isInside,
  judgeAddress,
  loopbackOf,
  parseCidr,
  parseWebhookUrl,
  URL_MAX_LENGTH,
} from '../src/address.ts';
import { printable } from '../src/printable.ts';
import { cidr } from './helpers/cidr.ts';

interface Vectors {
  refused: string[];
  allowed: string[];
  urls_refused: unknown[];
  urls_accepted: string[];
}
const vectors: Vectors = JSON.parse(readFileSync(`${import.meta.dirname}/vectors/addresses.json`, 'utf8'));

const closed = { allowHttp: false, allowedCidrs: [] };

function cidrs(...texts: string[]): Cidr[] {
  return texts.map(cidr);
}

t.test('an address', async (t) => {
  t.test('is refused if it is private, local, reserved or stands for another', async (t) => {
    const more = [
      '100.100.100.200', // metadata
      '192.0.0.192', // metadata
      '192.31.196.1',
      '192.52.193.1',
      '192.88.99.1',
      '192.175.48.1',
      'fd00:ec2::254', // metadata
      '::ffff:8.8.8.8',
      '::ffff:0:8.8.8.8',
      '64:ff9b::8.8.8.8',
      '2001:2::1',
      '2001:10::1',
      '2001:20::1',
      '2001:1ff:ffff::1',
      '2620:4f:8000::1',
      '3ffe::1',
      '1fff::1',
      'fe80::1%lo',
      'fe80::1%br-0',
    ];
    for (const ip of [...vectors.refused, ...more]) t.equal(judgeAddress(ip, []), 'refused', ip);
  });

  t.test('is refused from the first to the last one of each special block', async (t) => {
    const blocks =
      '0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24' +
      ' 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15' +
      ' 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3 ::/3 2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48' +
      ' 3ffe::/16 3fff::/20 4000::/2 8000::/1';
    for (const block of blocks.split(' ')) {
      const kind = block.includes(':') ? ipaddr.IPv6 : ipaddr.IPv4;
      const first = kind.networkAddressFromCIDR(block).toString();
      const last = kind.broadcastAddressFromCIDR(block).toString();
      for (const ip of [first, last]) t.equal(judgeAddress(ip, []), 'refused', ip);
    }
  });

  t.test('is allowed if it is public', async (t) => {
    const more = ['2001:200::1', '2001:4860:4860::8888', '2003::1', '168.63.129.15', '168.63.129.17'];
    for (const ip of [...vectors.allowed, ...more]) t.equal(judgeAddress(ip, []), 'allowed', ip);
  });

  t.test('is refused in every notation but the standard one', async (t) => {
    const texts = ['', 'localhost', 'example.com', '8.8', '134744072', '0x08080808', '010.8.8.8', '8.8.8.8.'];
    for (const text of [...texts, ' 8.8.8.8', '8.8.8.8/32', '[2606:4700:4700::1111]', '2606:4700']) {
      t.equal(judgeAddress(text, []), 'refused', text);
      t.equal(judgeAddress(text, cidrs('0.0.0.0/0', '::/0')), 'refused', `${text}, everything opened`);
    }
  });

  t.test('is allowed within the allowed blocks, and otherwise only if it is public', async (t) => {
    const opened = cidrs('10.1.0.0/16', 'fd00:1::/32', '127.0.0.1');
    for (const ip of ['10.1.0.0', '10.1.255.255', 'fd00:1::', 'fd00:1:ffff::1', '127.0.0.1', '8.8.8.8']) {
      t.equal(judgeAddress(ip, opened), 'allowed', ip);
    }
    for (const ip of ['10.0.255.255', '10.2.0.0', 'fd00:2::', '127.0.0.2', '::1', '::ffff:10.1.0.1']) {
      t.equal(judgeAddress(ip, opened), 'refused', ip);
    }
  });

  t.test('is refused wherever an independent list has a special range', async () => {
    const bytes = fc.uint8Array({ minLength: 16, maxLength: 16 });
    // Random addresses rarely fall into a small block: these begin as the special ones do.
    const starts = fc.constantFrom(
      ...[...vectors.refused, '2001::', '2620:4f:8000::', '2000::'].map(bytesOf),
    );
    const near = fc
      .tuple(starts, bytes, fc.integer({ min: 0, max: 16 }))
      .map(([start, rest, kept]) => start.map((byte, index) => (index < kept ? byte : (rest[index] ?? 0))));
    fc.assert(
      fc.property(near, (list) => {
        const ip = ipaddr.fromByteArray(list);
        fc.pre(ip.range() !== 'unicast');
        return judgeAddress(ip.toString(), []) === 'refused';
      }),
      { numRuns: 3_000 },
    );
  });
});

function bytesOf(ip: string): number[] {
  return ipaddr.parse(ip).toByteArray();
}

t.test('a block', async (t) => {
  t.test('is rejected if it is malformed or has bits beyond its prefix', async (t) => {
    const refused = [
      '',
      '10.0.0.0/',
      '10.0.0.0/33',
      '10.0.0.0/08',
      '10.0.0.0/-1',
      '10.0.0.0/8/8',
      '10/8',
      '::/129',
    ];
    for (const text of [
      ...refused,
      '10.0.0.1/8',
      'fd00::1/8',
      'localhost/8',
      ' 10.0.0.0/8',
      'fe80::%lo/64',
    ]) {
      t.notOk(parseCidr(text).ok, text);
    }
  });

  t.test('contains its first and its last address, and none next to them', async (t) => {
    const block = cidrs('172.16.0.0/12');
    t.ok(isInside('172.16.0.0', block));
    t.ok(isInside('172.31.255.255', block));
    t.notOk(isInside('172.15.255.255', block));
    t.notOk(isInside('172.32.0.0', block));
    t.ok(isInside('1.2.3.4', cidrs('0.0.0.0/0')));
    t.notOk(isInside('::1', cidrs('0.0.0.0/0')));
    t.notOk(isInside('nonsense', cidrs('0.0.0.0/0', '::/0')));
    t.ok(
      isInside('172.16.0.0', cidrs('10.0.0.0/8', '172.16.0.0/12', 'fd00::/8')),
      'one of several is enough',
    );
    t.notOk(isInside('172.16.0.0', []));
  });

  t.test('agrees with an independent implementation', async () => {
    fc.assert(
      fc.property(fc.ipV4(), fc.ipV4(), fc.integer({ min: 0, max: 32 }), (network, ip, prefixLength) => {
        const first = ipaddr.IPv4.networkAddressFromCIDR(`${network}/${prefixLength}`).toString();
        const expected = ipaddr.IPv4.parse(ip).match(ipaddr.IPv4.parse(first), prefixLength);
        return isInside(ip, cidrs(`${first}/${prefixLength}`)) === expected;
      }),
    );
  });
});

t.test('a webhook URL', async (t) => {
  t.test('is rejected if it is malformed, is not https or leads to a private address', async (t) => {
    const more = [
      'https:example.com/h',
      'https:/example.com/h',
      'https:///example.com/h',
      'https://@example.com/h',
      'https://:@example.com/h',
      'https://u:p@example.com//h',
      'https://example.com/h#',
      'https://example.com/\th',
      ' https://example.com/',
      'https://example.com/\u00a0',
      'https://example.com/\u2028',
      'https://example.com/\ud800',
      'https://example.com/\u0000',
      'https:\\\\example.com/h',
      'https://example.com/a\\b',
      'https://exam\nple.com/',
      'https://LOCALHOST/',
      'https://localhost../',
      'https://a.b.localhost:8443/',
      'https://localhost%2e/',
      'https://%6cocalhost/',
      'https://%31%32%37.0.0.1/',
      'https://①②⑦.0.0.1/',
      'https://0/',
      'https://10.1/',
      'https://168.63.129.16/',
      'https://[::]/',
      'https://[64:ff9b::a00:1]/',
      'https://[fe80::1%25eth0]/',
      'https://256.1.1.1/',
      'wss://example.com/',
      { toString: () => 'https://example.com/' },
      ['https://example.com/'],
      undefined,
    ];
    for (const value of [...vectors.urls_refused, ...more]) {
      const result = parseWebhookUrl(value, closed);
      t.notOk(result.ok, printable(String(value)));
    }
  });

  t.test('is accepted if it leads to a name or a public address', async (t) => {
    for (const value of vectors.urls_accepted)
      t.same(parseWebhookUrl(value, closed), { ok: true, url: value });
  });

  t.test('is kept in the normal form in which it is used', async (t) => {
    for (const [value, url] of [
      ['HTTPS://Example.COM', 'https://example.com/'],
      ['https://example.com:443/a/../b', 'https://example.com/b'],
      ['https://bücher.example/ü?ü=1', 'https://xn--bcher-kva.example/%C3%BC?%C3%BC=1'],
      ['https://0x08.8.8.8/', 'https://8.8.8.8/'],
      ['https://example.com./h', 'https://example.com./h'],
      ['https://example.com/@here', 'https://example.com/@here'],
    ]) {
      t.same(parseWebhookUrl(value, closed), { ok: true, url }, String(value));
    }
  });

  t.test('is refused if DNS cannot hold its host name', async (t) => {
    const label = 'a'.repeat(63);
    const longest = `${`${label}.`.repeat(3)}${'a'.repeat(61)}`;
    for (const name of [`${label}.example`, longest, `${longest}.`, '_dmarc.xn--bcher-kva.example']) {
      t.ok(parseWebhookUrl(`https://${name}/`, closed).ok, name);
    }
    const impossible = [
      'a..b',
      '.example.com',
      'example.com..',
      '.',
      `a${label}.example`,
      `a${longest}`,
      `a${longest}.`,
    ];
    for (const name of impossible) {
      const reason =
        'must have a host name that DNS can hold: 1 to 63 characters between dots, and 253 in all';
      t.same(parseWebhookUrl(`https://${name}/`, closed), { ok: false, reason }, name);
    }
  });

  t.test('has 2048 characters at most, before and after normalisation', async (t) => {
    const start = 'https://example.com/';
    const longest = start + 'a'.repeat(URL_MAX_LENGTH - start.length);
    t.same(parseWebhookUrl(longest, closed), { ok: true, url: longest });
    t.notOk(parseWebhookUrl(`${longest}a`, closed).ok);
    t.notOk(parseWebhookUrl(start + 'ü'.repeat(400), closed).ok, 'each ü becomes six characters');
    t.notOk(parseWebhookUrl(start + 'a/../'.repeat(410), closed).ok, 'though little would be left of it');
  });

  t.test('may be http if that is allowed', async (t) => {
    const rules = { allowHttp: true, allowedCidrs: [] };
    t.same(parseWebhookUrl('http://example.com/h', rules), { ok: true, url: 'http://example.com/h' });
    t.ok(parseWebhookUrl('https://example.com/h', rules).ok);
    for (const value of [
      'http://127.0.0.1/',
      'http://localhost/',
      'http:/example.com/',
      'ftp://example.com/',
      'ftp+https://example.com/',
    ]) {
      t.notOk(parseWebhookUrl(value, rules).ok, value);
    }
  });

  t.test('may lead to a private address in an allowed block', async (t) => {
    const rules = { allowHttp: true, allowedCidrs: cidrs('10.0.0.0/8') };
    t.ok(parseWebhookUrl('http://10.1.2.3:9000/h', rules).ok);
    t.notOk(parseWebhookUrl('http://localhost:9000/h', rules).ok);
    t.notOk(parseWebhookUrl('http://192.168.1.1/h', rules).ok);
  });

  t.test('may name localhost if a loopback address is allowed', async (t) => {
    for (const opened of ['127.0.0.0/8', '127.0.0.1', '::1/128']) {
      const rules = { allowHttp: true, allowedCidrs: cidrs(opened) };
      t.same(parseWebhookUrl('http://localhost:9000/h', rules), { ok: true, url: 'http://localhost:9000/h' });
      t.ok(parseWebhookUrl('http://hooks.localhost./h', rules).ok);
    }
    t.notOk(parseWebhookUrl('https://localhost/', { allowHttp: true, allowedCidrs: cidrs('127.0.0.2') }).ok);
  });

  t.test('is not echoed in the reason for a rejection', async (t) => {
    for (const value of [
      'https://u:hunter2@example.com/',
      'https://127.0.0.1/hunter2',
      'hunter2',
      'http://hunter2/',
    ]) {
      const result = parseWebhookUrl(value, closed);
      t.notOk(result.ok);
      t.notMatch(JSON.stringify(result), /hunter2|127/);
    }
  });

  t.test('is accepted unchanged once normalised, and its host is no refused address', async () => {
    const pieces = [
      'https://',
      'http://',
      '/',
      '.',
      ':',
      '@',
      '?',
      '#',
      '[',
      ']',
      '%',
      '127.0.0.1',
      '::1',
      '\\',
      ' ',
    ];
    const built = fc.array(fc.oneof(fc.constantFrom(...pieces), fc.string({ maxLength: 4 })), {
      maxLength: 8,
    });
    const value = fc.oneof(
      fc.webUrl({ validSchemes: ['https'], withQueryParameters: true }),
      fc.ipV4Extended().map((ip) => `https://${ip}/`),
      fc.ipV6().map((ip) => `https://[${ip}]/`),
      built.map((parts) => `https://${parts.join('')}`),
    );
    fc.assert(
      fc.property(value, (text) => {
        const result = parseWebhookUrl(text, closed);
        if (!result.ok) return true;
        const again = parseWebhookUrl(result.url, closed);
        const hostname = new URL(result.url).hostname.replace(/^\[|\]$/g, '');
        const literal = ipaddr.isValid(hostname) && judgeAddress(hostname, []) === 'refused';
        return again.ok && again.url === result.url && !literal;
      }),
      { numRuns: 500 },
    );
  });
});

t.test('a localhost name leads to the loopback addresses that are allowed', async (t) => {
  t.same(loopbackOf('localhost', []), []);
  t.same(loopbackOf('localhost', cidrs('127.0.0.0/8')), ['127.0.0.1']);
  t.same(loopbackOf('LocalHost', cidrs('127.0.0.0/8')), ['127.0.0.1']);
  t.same(loopbackOf('a.localhost.', cidrs('127.0.0.0/8', '::1')), ['127.0.0.1', '::1']);
  for (const name of ['localhost.example', 'notlocalhost', 'localhost.localdomain', '']) {
    t.equal(loopbackOf(name, cidrs('127.0.0.0/8')), undefined, name);
  }
});

t.test('a refused block ends with its last address, and is of one address family', async (t) => {
  for (const last of [
    '198.19.255.255',
    '100.127.255.255',
    '172.31.255.255',
    '3fff:fff:ffff::',
    '2001:1ff:ffff::',
  ]) {
    t.equal(judgeAddress(last, []), 'refused', last);
  }
  for (const next of ['198.20.0.0', '100.128.0.0', '172.32.0.0', '3fff:1000::', '2001:200::']) {
    t.equal(judgeAddress(next, []), 'allowed', next);
  }
  // The bytes of 2001:db8::/32.
  t.equal(judgeAddress('32.1.13.184', []), 'allowed');
});

t.test('the path and the query of a webhook URL may contain an @', async (t) => {
  for (const url of ['https://example.com/?to=a@b', 'https://example.com/@a']) {
    t.same(parseWebhookUrl(url, { allowHttp: false, allowedCidrs: [] }), { ok: true, url });
  }
  t.match(parseWebhookUrl('https://example.com?to=a@b', { allowHttp: false, allowedCidrs: [] }), {
    ok: true,
  });
});
