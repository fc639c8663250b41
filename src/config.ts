import { isIP } from 'node:net';
import { InvalidArgumentError, type Option } from 'commander';
import { type Cidr, parseCidr } from './address.ts';
import { LONGEST_DURATION, parseDuration } from './durations.ts';
import { AppError } from './errors.ts';
import { appending, durationMsOf, nullIfOff, oneOf, option, orOff, parseCount } from './options.ts';
import { absolutePath } from './paths.ts';

/** The checked options of `davit serve`, with units in the names. All paths are absolute. */
export type ServeConfig = Readonly<
  Omit<Settings, 'tlsCertPath' | 'tlsKeyPath'> & {
    dbPath: string;
    /** PEM files; null: plain HTTP. */
    tls: { certPath: string; keyPath: string } | null;
    /** How long running commands may continue once the service has been told to stop. */
    shutdownGraceMs: number;
  }
>;

type Settings = { [Name in keyof typeof SETTINGS]: ValueOf<(typeof SETTINGS)[Name]> };
type ValueOf<S> = S extends Setting<infer Value> ? Value : never;

/** Leaves 5 s for everything that is stopped after the commands: a stop takes at most 30 s. */
const SHUTDOWN_GRACE_MS = 25_000;

/** Not in logger.ts, as importing that loads the logging library. */
export const LOG_LEVELS = ['debug', 'info', 'warn', 'error', 'silent'] as const;
export type LogLevel = (typeof LOG_LEVELS)[number];

/** Where to listen: an address or host name of this machine, and a port; 0: any free one. */
export interface ListenAddress {
  host: string;
  port: number;
}

/** The options of `davit serve`, each with its default as it would be typed. */
const SETTINGS = {
  listen: setting(
    '--listen <host:port>',
    'where to listen; port 0 takes a free one',
    '127.0.0.1:8080',
    parseListen,
  ),
  tlsCertPath: optional('--tls-cert <file>', 'certificate chain in PEM, for HTTPS', parsePath),
  tlsKeyPath: optional('--tls-key <file>', 'private key of the certificate, in PEM', parsePath),
  trustProxyCidrs: blocks('--trust-proxy <cidr>', 'trust X-Forwarded-For from proxies in this block'),
  rateLimit: limit(
    '--rate-limit <n/duration>',
    'requests that each key may send per duration, or off',
    '600/1m',
    parseRateLimit,
  ),
  maxConcurrent: setting(
    '--max-concurrent <n>',
    'commands that may run at the same time, over all projects',
    '2',
    parseCount,
  ),
  maxQueued: limit(
    '--max-queued <n>',
    'deployments that may wait in one project with a command and the policy queue, or off',
    '100',
    parseCount,
  ),
  webhookTimeoutMs: setting(
    '--webhook-timeout <duration>',
    'how long a receiver may take to answer',
    '10s',
    durationMsOf,
  ),
  webhookRetryDelaysMs: setting(
    '--webhook-retry-delays <list>',
    'waits between attempts of a delivery, each up to 10 % longer at random',
    '5s,30s,2m,6m,18m,45m,1h45m,3h30m,7h',
    durationsMsOf,
  ),
  webhookRetryWindowMs: setting(
    '--webhook-retry-window <duration>',
    'how long after the event, or a first attempt that came late, the last attempt is made',
    '24h',
    durationMsOf,
  ),
  webhookAllowCidrs: blocks(
    '--webhook-allow-cidr <cidr>',
    'deliver to addresses in this block, too, although they are not public',
  ),
  webhookAllowHttp: flag('--webhook-allow-http', 'deliver to http:// URLs, too'),
  webhookCaFile: optional(
    '--webhook-ca-file <file>',
    'trust the certificates in this file (PEM) of receivers, too',
    parsePath,
  ),
  metricsListen: optional(
    '--metrics-listen <host:port>',
    'where to serve Prometheus metrics, at /metrics and without a key; by default not at all',
    parseListen,
  ),
  retentionMs: limit(
    '--retention <duration>',
    'how long finished deployments, events and deliveries are kept, or off',
    '90d',
    durationMsOf,
  ),
  logLevel: setting(
    '--log-level <level>',
    'debug, info, warn, error or silent',
    'info',
    oneOf(LOG_LEVELS),
    LOG_LEVELS,
  ),
};

/** For commander. Each option can also be given by its environment variable. */
export function serveOptions(): Option[] {
  return allSettings().options();
}

type ServeConfigResult = { ok: true; config: ServeConfig } | { ok: false; reason: string };

/** `path`: of `--db`; `values`: what commander parsed for `serveOptions`, defaults included. */
export function serveConfig(path: string, values: Readonly<Record<string, unknown>>): ServeConfigResult {
  const { tlsCertPath, tlsKeyPath, ...settings } = allSettings().valuesFrom(values);
  if ((tlsCertPath === null) !== (tlsKeyPath === null)) {
    return { ok: false, reason: '--tls-cert and --tls-key go together: give both or neither' };
  }
  const tls =
    tlsCertPath === null || tlsKeyPath === null ? null : { certPath: tlsCertPath, keyPath: tlsKeyPath };
  const { listen, metricsListen } = settings;
  if (metricsListen !== null && listen.port !== 0 && listenText(metricsListen) === listenText(listen)) {
    return {
      ok: false,
      reason: '--listen and --metrics-listen are the same place: choose another port for one of them',
    };
  }
  const config = Object.freeze({
    dbPath: absolutePath(path),
    tls,
    shutdownGraceMs: SHUTDOWN_GRACE_MS,
    ...settings,
  });
  return { ok: true, config };
}

/** The error for an address that cannot be listened on; `optionName`: the option that chose it. */
export function cannotListen(
  address: ListenAddress,
  optionName: string,
  error: Error & { code?: unknown },
): AppError {
  const allow =
    error.code === 'EACCES' && address.port < 1024
      ? ", or allow ports below 1024, as the comments of 'davit admin systemd-unit' say"
      : '';
  return new AppError(
    'unavailable',
    `cannot listen on ${listenText(address)} (${String(error.code ?? error.message)}): choose another place with ${optionName}${allow}`,
    { cause: error },
  );
}

/** The address as it would be typed: `127.0.0.1:8080`, `[::1]:0`. */
export function listenText({ host, port }: ListenAddress): string {
  return `${host.includes(':') ? `[${host}]` : host}:${port}`;
}

/** Some of these options and their values, for a command that does a part of what `serve` does. */
export function someSettings<Name extends keyof Settings>(...names: Name[]) {
  return {
    options: (): Option[] => names.map((name) => SETTINGS[name].option),
    /** `values`: what commander parsed for the options, defaults included. */
    valuesFrom(values: Readonly<Record<string, unknown>>): Pick<Settings, Name> {
      const entries = names.map((name) => {
        const { option, toValue } = SETTINGS[name];
        return [name, toValue(values[option.attributeName()])];
      });
      return Object.fromEntries(entries) as Pick<Settings, Name>;
    },
  };
}

function allSettings() {
  return someSettings(...(Object.keys(SETTINGS) as (keyof Settings)[]));
}

interface Setting<Value> {
  option: Option;
  /** The setting's value, from what commander holds for the option: its parser's result or its default. */
  toValue(held: unknown): Value;
}

function setting<Value>(
  flags: string,
  description: string,
  defaultText: string,
  parse: (text: string) => Value,
  /** Offered by shell completion. */
  choices: readonly string[] = [],
): Setting<Value> {
  return {
    option: option(flags, description)
      .choices(choices)
      .argParser(parse)
      .default(parse(defaultText), defaultText),
    toValue: (held) => held as Value,
  };
}

function limit<Value>(
  flags: string,
  description: string,
  defaultText: string,
  parse: (text: string) => Value,
): Setting<Value | null> {
  return {
    ...setting(flags, description, defaultText, orOff(parse)),
    toValue: (held) => nullIfOff(held as Value | 'off'),
  };
}

function optional<Value>(
  flags: string,
  description: string,
  parse: (text: string) => Value,
): Setting<Value | null> {
  return {
    option: option(flags, description).argParser<Value>(parse),
    toValue: (held) => (held === undefined ? null : (held as Value)),
  };
}

function blocks(flags: string, description: string): Setting<Cidr[]> {
  const append = appending(parseBlock);
  return {
    option: option(flags, `${description}; may be repeated, or a list with commas`)
      .argParser<Cidr[]>((text, before) => (text === 'none' ? [] : append(text, before)))
      .default([], 'none'),
    toValue: (held) => held as Cidr[],
  };
}

function flag(flags: string, description: string): Setting<boolean> {
  return { option: option(flags, description), toValue: (held) => held === true };
}

function durationsMsOf(text: string): number[] {
  const durationsMs = text.split(',').map((item) => parseDuration(item.trim()) ?? 0);
  if (!durationsMs.includes(0)) return durationsMs;
  throw new InvalidArgumentError(
    `It must be a list of durations such as 5s,30s,2m, each at most ${LONGEST_DURATION}.`,
  );
}

function parseListen(text: string): ListenAddress {
  const [, ipv6, name, digits = ''] = /^(?:\[([\da-fA-F:.]+)\]|([^\s:[\]/]+)):(\d{1,5})$/.exec(text) ?? [];
  const host = ipv6 ?? name;
  const port = Number(digits);
  if (host === undefined || (ipv6 !== undefined && isIP(ipv6) !== 6) || port > 65_535) {
    throw new InvalidArgumentError(
      'It must be an address and a port, such as 127.0.0.1:8080, 0.0.0.0:80 or [::1]:0.',
    );
  }
  return { host, port };
}

function parseRateLimit(text: string): { limit: number; windowMs: number } {
  const [, limit, duration = ''] = /^([1-9]\d{0,5})\/(.+)$/.exec(text) ?? [];
  const windowMs = parseDuration(duration);
  if (limit === undefined || windowMs === undefined || windowMs === 0) {
    throw new InvalidArgumentError(
      `It must be 1 to 999999 requests and a duration of at most ${LONGEST_DURATION}, such as 600/1m.`,
    );
  }
  return { limit: Number(limit), windowMs };
}

function parseBlock(text: string): Cidr {
  const result = parseCidr(text);
  if (!result.ok) throw new InvalidArgumentError(`It ${result.reason}.`);
  return result.cidr;
}

function parsePath(text: string): string {
  if (text === '') throw new InvalidArgumentError('It must be the path of a file.');
  return absolutePath(text);
}
