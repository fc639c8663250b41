import { resolve } from 'node:path';
import { Command, CommanderError } from 'commander';
import t from 'tap';
import {
  cannotListen,
  LOG_LEVELS,
  listenText,
  type ServeConfig,
  serveConfig,
  serveOptions,
  someSettings,
} from '../src/config.ts';
import { cidr } from './helpers/cidr.ts';

t.test('without options the configuration has the documented defaults', async (t) => {
  t.strictSame(configOf([]), {
    dbPath: resolve('davit.db'),
    tls: null,
    shutdownGraceMs: 25_000,
    listen: { host: '127.0.0.1', port: 8080 },
    trustProxyCidrs: [],
    rateLimit: { limit: 600, windowMs: 60_000 },
    maxConcurrent: 2,
    maxQueued: 100,
    webhookTimeoutMs: 10_000,
    webhookRetryDelaysMs: [5, 30, 120, 360, 1080, 2700, 6300, 12_600, 25_200].map(
      (seconds) => seconds * 1000,
    ),
    webhookRetryWindowMs: 24 * 60 * 60_000,
    webhookAllowCidrs: [],
    webhookAllowHttp: false,
    webhookCaFile: null,
    metricsListen: null,
    retentionMs: 90 * 24 * 60 * 60_000,
    logLevel: 'info',
  });
  t.ok(Object.isFrozen(configOf([])));
});

t.test('another command takes some of the options, with their defaults and variables', async (t) => {
  const { options, valuesFrom } = someSettings('maxQueued', 'webhookAllowCidrs');
  const valuesOf = (words: string[]) => {
    const command = new Command().exitOverride();
    for (const option of options()) command.addOption(option);
    return valuesFrom(command.parse(words, { from: 'user' }).opts());
  };
  t.strictSame(
    options().map(({ long, envVar }) => [long, envVar]),
    [
      ['--max-queued', 'DAVIT_MAX_QUEUED'],
      ['--webhook-allow-cidr', 'DAVIT_WEBHOOK_ALLOW_CIDR'],
    ],
  );
  t.strictSame(valuesOf([]), { maxQueued: 100, webhookAllowCidrs: [] });
  t.strictSame(valuesOf(['--max-queued', 'off']), { maxQueued: null, webhookAllowCidrs: [] });
});

t.test('every option is in the configuration', async (t) => {
  const config = configOf([
    ...['--listen', '[::1]:0', '--tls-cert', 'c.pem', '--tls-key', 'k.pem'],
    ...['--trust-proxy', '10.0.0.0/8, fd00::/8', '--trust-proxy', '192.168.1.1'],
    ...['--rate-limit', '5/1s', '--max-concurrent', '8', '--max-queued', '1'],
    ...['--webhook-timeout', '3s', '--webhook-retry-delays', '1s, 1m', '--webhook-retry-window', '1h30m'],
    ...['--webhook-allow-cidr', '127.0.0.0/8', '--webhook-allow-http', '--webhook-ca-file', 'ca.pem'],
    ...['--metrics-listen', '127.0.0.1:9464', '--retention', '12h', '--log-level', 'silent'],
  ]);
  t.strictSame(config, {
    dbPath: resolve('davit.db'),
    tls: { certPath: resolve('c.pem'), keyPath: resolve('k.pem') },
    shutdownGraceMs: 25_000,
    listen: { host: '::1', port: 0 },
    trustProxyCidrs: ['10.0.0.0/8', 'fd00::/8', '192.168.1.1'].map(cidr),
    rateLimit: { limit: 5, windowMs: 1_000 },
    maxConcurrent: 8,
    maxQueued: 1,
    webhookTimeoutMs: 3_000,
    webhookRetryDelaysMs: [1_000, 60_000],
    webhookRetryWindowMs: 5_400_000,
    webhookAllowCidrs: [cidr('127.0.0.0/8')],
    webhookAllowHttp: true,
    webhookCaFile: resolve('ca.pem'),
    metricsListen: { host: '127.0.0.1', port: 9464 },
    retentionMs: 43_200_000,
    logLevel: 'silent',
  });
});

t.test('an option that is off is null', async (t) => {
  t.match(configOf(['--rate-limit', 'off', '--max-queued', 'off', '--retention', 'off']), {
    rateLimit: null,
    maxQueued: null,
    retentionMs: null,
  });
  t.match(
    configOf(['--webhook-ca-file', 'off']),
    { webhookCaFile: resolve('off') },
    'a file may have that name',
  );
});

t.test('none, the default, empties a list of blocks, but is no block within a list', async (t) => {
  const { trustProxyCidrs, webhookAllowCidrs } = configOf([
    '--trust-proxy',
    'none',
    '--webhook-allow-cidr=none',
  ]);
  t.strictSame([trustProxyCidrs, webhookAllowCidrs], [[], []]);
  t.strictSame(configOf(['--trust-proxy', '10.0.0.1', '--trust-proxy', 'none']).trustProxyCidrs, []);
  for (const list of ['none,10.0.0.1', '10.0.0.1,none'])
    t.match(refusalOf(['--trust-proxy', list]), /10\.0\.0\.0\/8/);
});

t.test('values of a repeated option do not pile up over command lines', async (t) => {
  t.equal(configOf(['--trust-proxy', '10.0.0.1']).trustProxyCidrs.length, 1);
  t.equal(configOf(['--trust-proxy', '10.0.0.1']).trustProxyCidrs.length, 1);
  t.strictSame(configOf([]).trustProxyCidrs, []);
});

t.test('every option has its environment variable', async (t) => {
  t.strictSame(
    serveOptions().map(({ long, envVar }) => [long, envVar]),
    serveOptions().map(({ long }) => [
      long,
      `DAVIT_${String(long).slice(2).replaceAll('-', '_').toUpperCase()}`,
    ]),
  );
});

t.test('every level that the logger knows can be chosen', async (t) => {
  for (const level of LOG_LEVELS) t.equal(configOf(['--log-level', level]).logLevel, level);
});

t.test('an invalid value is rejected with the name of the option and an example', async (t) => {
  const wrong: [option: string, example: string, values: string[]][] = [
    [
      '--listen',
      '127.0.0.1:8080',
      [
        '',
        '8080',
        ':8080',
        'localhost',
        '127.0.0.1:65536',
        '::1:80',
        '[::1',
        '[127.0.0.1]:80',
        'a b:80',
        'http://x:80',
        'a/b:80',
        '127.0.0.1:-1',
        '127.0.0.1:8080x',
        'a]b:80',
      ],
    ],
    ['--metrics-listen', '127.0.0.1:8080', ['', '9464', ':9464', 'http://127.0.0.1:9464', 'off']],
    [
      '--rate-limit',
      '600/1m',
      ['', '600', '600/', '/1m', '600/1m/2', '1.5/1m', '600/0s', '600/m', '0/1m', '06/1m', 'OFF'],
    ],
    ['--max-concurrent', '1 to 999999', ['0', '-1', '1.5', '1e3', '', 'off', '1000000', ' 2']],
    ['--max-queued', '1 to 999999', ['0', 'x']],
    ['--webhook-timeout', '10s', ['0', '0s', '10', '10ms', 'off']],
    ['--webhook-retry-delays', 'list of durations such as 5s,30s,2m', ['', '5s,', '5s,x', '5s;30s', '5s,0s']],
    ['--webhook-retry-window', '24h', ['forever']],
    ['--trust-proxy', '10.0.0.0/8', ['', 'localhost', '10.0.0.0/8,', '10.0.0.0/8/9']],
    ['--webhook-allow-cidr', 'from 0 to 32', ['10.0.0.0/33']],
    ['--retention', '5d', ['', '0', '0d', '90', 'never', '-1d']],
    ['--log-level', 'info', ['', 'INFO', 'verbose']],
    ['--tls-cert', 'path', ['']],
  ];
  for (const [option, example, values] of wrong) {
    for (const value of values) {
      const message = refusalOf([`${option}=${value}`]);
      t.ok(message.includes(option) && message.includes(example), `${option}=${value}: ${message}`);
    }
  }
});

t.test('a value out of bounds is rejected with the bound, the bound itself is not', async (t) => {
  const { rateLimit, maxConcurrent, retentionMs } = configOf([
    ...['--rate-limit', '999999/36500d', '--max-concurrent', '999999', '--retention', '36500d'],
  ]);
  const centuryMs = 36_500 * 24 * 60 * 60_000;
  t.strictSame(
    [rateLimit, maxConcurrent, retentionMs],
    [{ limit: 999_999, windowMs: centuryMs }, 999_999, centuryMs],
  );
  for (const [option, value, bound] of [
    ['--retention', '36501d', 'at most 36500d'],
    ['--webhook-timeout', '9999999999999s', 'at most 36500d'],
    ['--webhook-retry-delays', '5s,36501d', 'at most 36500d'],
    ['--rate-limit', '1000000/1m', '1 to 999999 requests'],
    ['--rate-limit', '600/99999d', 'at most 36500d'],
    ['--max-concurrent', '1000000', 'from 1 to 999999'],
  ] as const) {
    t.ok(refusalOf([`${option}=${value}`]).includes(bound), `${option}=${value}`);
  }
});

t.test('an address to listen on is shown as one types it, with the cause if it fails', async (t) => {
  for (const text of ['127.0.0.1:65535', '[::1]:0', '[::ffff:127.0.0.1]:1', 'deploy.example:80']) {
    t.equal(listenText(configOf(['--listen', text]).listen), text);
  }
  const inUse = Object.assign(new Error('listen EADDRINUSE'), { code: 'EADDRINUSE' });
  const { code, message, cause } = cannotListen({ host: '::1', port: 80 }, '--listen', inUse);
  t.strictSame([code, cause], ['unavailable', inUse]);
  t.equal(message, 'cannot listen on [::1]:80 (EADDRINUSE): choose another place with --listen');
  t.match(
    cannotListen({ host: 'x', port: 80 }, '--listen', new Error('no such place')).message,
    /\(no such place\)/,
  );
});

t.test('where a port below 1024 is refused, the error says what allows it', async (t) => {
  const refused = Object.assign(new Error('listen EACCES'), { code: 'EACCES' });
  t.equal(
    cannotListen({ host: '0.0.0.0', port: 1023 }, '--listen', refused).message,
    'cannot listen on 0.0.0.0:1023 (EACCES): choose another place with --listen, or allow ports below 1024, as the comments ' +
      "of 'davit admin systemd-unit' say",
  );
  t.equal(
    cannotListen({ host: '0.0.0.0', port: 1024 }, '--listen', refused).message,
    'cannot listen on 0.0.0.0:1024 (EACCES): choose another place with --listen',
  );
});

t.test('--tls-cert and --tls-key are rejected one without the other', async (t) => {
  for (const half of [
    ['--tls-cert', 'c.pem'],
    ['--tls-key', 'k.pem'],
  ]) {
    t.match(serveConfig('davit.db', valuesOf(half)), { ok: false, reason: /--tls-cert and --tls-key/ });
  }
});

t.test('the API and the metrics cannot listen on the same address', async (t) => {
  const at = (listen: string, metricsListen: string) =>
    serveConfig('davit.db', valuesOf(['--listen', listen, '--metrics-listen', metricsListen]));
  for (const place of ['127.0.0.1:8080', '[::1]:9464']) {
    t.match(at(place, place), { ok: false, reason: /--listen and --metrics-listen are the same place/ });
  }
  for (const place of ['127.0.0.1:9464', '127.0.0.2:8080', '[::1]:8080']) {
    t.match(at('127.0.0.1:8080', place), { ok: true });
  }
  t.match(at('127.0.0.1:0', '127.0.0.1:0'), { ok: true }, 'two free ports are never the same');
});

function configOf(words: string[]): ServeConfig {
  const result = serveConfig('davit.db', valuesOf(words));
  if (!result.ok) throw new Error(result.reason);
  return result.config;
}

function valuesOf(words: string[]): Record<string, unknown> {
  const command = new Command().exitOverride().configureOutput({ writeErr: () => undefined });
  for (const option of serveOptions()) command.addOption(option);
  return command.parse(words, { from: 'user' }).opts();
}

function refusalOf(words: string[]): string {
  try {
    valuesOf(words);
  } catch (error) {
    if (error instanceof CommanderError) return error.message;
  }
  throw new Error(`${words.join(' ')} was accepted`);
}
