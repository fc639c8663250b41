import { Agent, type IncomingMessage, request as startRequest } from 'node:http';
import { Ajv2020, type ValidateFunction } from 'ajv/dist/2020.js';
import formats from 'ajv-formats';
import fc, { type Arbitrary } from 'fast-check';
import { parseRef } from '../../src/domain.ts';
import type { JsonSchema } from '../../src/http/json-schema.ts';
import {
  METHODS,
  type OpenApiDocument,
  type Operation,
  type Parameter,
} from '../../src/http/openapi-types.ts';
import type { Exchange } from './contract.ts';

/** A request as it is to be sent, and what of it can be held against the description. */
export interface FuzzRequest {
  /** `METHOD /path/{as_described}`; empty where the description has no such operation. */
  operation: string;
  method: string;
  path: string;
  headers: Record<string, string>;
  body: string | undefined;
  /** Whether the description allows its query and body; unknown where the syntax itself is odd. */
  verdict: 'allowed' | 'refused' | 'unknown';
}

/** Values that were seen in answers, and are likely to be taken again. */
export interface Pool {
  /** By prefix: `dpl`, `whk` and so on. */
  ids: Map<string, string[]>;
  cursors: string[];
}

const POOL_SIZE = 40;

/** Remembers the ids and cursors of an answer. */
export function remember(pool: Pool, body: string): void {
  for (const [id, prefix = ''] of body.matchAll(/\b(prj|dpl|whk|dlv)_[0-9A-Za-z]{24}\b/g)) {
    const ids = pool.ids.get(prefix) ?? [];
    if (!ids.includes(id)) ids.push(id);
    if (ids.length > POOL_SIZE) ids.shift();
    pool.ids.set(prefix, ids);
  }
  const cursor = /"next_cursor":"([^"]+)"/.exec(body)?.[1];
  if (cursor !== undefined) pool.cursors.push(cursor);
  if (pool.cursors.length > POOL_SIZE) pool.cursors.shift();
}

/**
 * Requests of every operation of `document`: as it describes them, with something wrong somewhere, and far off.
 * `keys`: those to authenticate with, the first of which may do everything. `urls`: addresses that webhooks may have.
 */
export function fuzzRequests(
  document: OpenApiDocument,
  pool: Pool,
  { keys, urls }: { keys: readonly string[]; urls: readonly string[] },
): Arbitrary<FuzzRequest> {
  const ajv = new Ajv2020({ allErrors: false, strictTypes: false });
  formats.default(ajv, ['date-time', 'uri-reference']);
  const values = valuesFrom(pool, urls);
  const operations = Object.entries(document.paths).flatMap(([path, item]) =>
    METHODS.flatMap((method) => {
      const operation = item[method];
      return operation === undefined ? [] : [requestsOf(path, method.toUpperCase(), operation)];
    }),
  );
  return fc.oneof(
    { weight: 60, arbitrary: fc.oneof(...operations) },
    { weight: 1, arbitrary: requestsOfNothing },
  );

  function requestsOf(path: string, method: string, operation: Operation): Arbitrary<FuzzRequest> {
    const { parameters = [], requestBody } = operation;
    const queryParameters = parameters.filter(({ in: place }) => place === 'query');
    const bodySchema = requestBody?.content['application/json']?.schema;
    const idempotencyKey = parameters.find(({ name }) => name === 'Idempotency-Key');
    const allows: Allows = {
      query: new Map(queryParameters.map(({ name, schema }) => [name, ajv.compile(schema)])),
      requiredQuery: queryParameters.filter(({ required }) => required).map(({ name }) => name),
      idempotencyKey: idempotencyKey === undefined ? undefined : ajv.compile(idempotencyKey.schema),
      body:
        bodySchema === undefined ? undefined : ajv.compile({ ...bodySchema, additionalProperties: false }),
      needsBody: requestBody?.required ?? false,
    };
    return fc
      .record({
        path: pathOf(path, parameters),
        query: queryOf(queryParameters),
        headers: headersOf(operation, method),
        body: bodyOf(bodySchema, method),
        oddly: rarely(15, fc.constantFrom('%', '%FF', '%00', '?', '&&', '&a', '&=', '&limit=1&limit=1')),
      })
      .map(({ path: sentPath, query, headers, body, oddly }) => {
        const search = query
          .map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(value)}`)
          .join('&');
        const type = headers['content-type'] ?? (body.text === undefined ? undefined : 'application/json');
        return {
          operation: `${method} ${path}`,
          method,
          path: `${sentPath}${search === '' && oddly === undefined ? '' : `?${search}${oddly ?? ''}`}`,
          headers: { ...headers, ...(type === undefined ? {} : { 'content-type': type }) },
          body: body.text,
          verdict:
            oddly !== undefined || /\/\.{0,2}(\/|$)/.test(sentPath) || !isSyntaxPlain(query, headers, body)
              ? 'unknown'
              : isAllowed(allows, query, headers, body.value, method)
                ? 'allowed'
                : 'refused',
        };
      });
  }

  function pathOf(path: string, parameters: Parameter[]): Arbitrary<string> {
    const names = parameters.filter(({ in: place }) => place === 'path').map(({ name }) => name);
    const parts = Object.fromEntries(
      names.map((name) => [
        name,
        fc.oneof({ weight: 12, arbitrary: values.id(name) }, { weight: 1, arbitrary: ODD_TEXT }),
      ]),
    );
    return fc
      .record(parts)
      .map((chosen) =>
        path.replaceAll(/\{(\w+)\}/g, (_match, name: string) => encodeURIComponent(chosen[name] ?? '')),
      );
  }

  function queryOf(parameters: Parameter[]): Arbitrary<[string, string][]> {
    const known = parameters.map(({ name, schema }) =>
      rarely(
        3,
        fc.oneof(
          { weight: 5, arbitrary: queryValues(name, schema) },
          { weight: 1, arbitrary: ODD_TEXT.map((text) => [text]) },
        ),
      ).map((texts = []) => texts.map((text): [string, string] => [name, text])),
    );
    const unknown = rarely(12, fc.tuple(ODD_TEXT, ODD_TEXT)).map((pair) =>
      pair === undefined ? [] : [[`x${pair[0]}`, pair[1]] as [string, string]],
    );
    return fc.tuple(...known, unknown).map((lists) => lists.flat());
  }

  function queryValues(name: string, schema: JsonSchema): Arbitrary<string[]> {
    if (name === 'wait') return fc.constantFrom(['0'], ['00'], ['-1'], ['61'], ['1.0'], ['']);
    if (name === 'cursor') return values.cursor.map((cursor) => [cursor]);
    if (schema.items !== undefined) {
      return fc.array(values.of(name, schema.items).map(String), { minLength: 1, maxLength: 4 });
    }
    return values.of(name, schema).map((value) => [String(value)]);
  }

  function headersOf({ parameters = [] }: Operation, method: string): Arbitrary<Record<string, string>> {
    const [all = '', ...others] = keys;
    return fc
      .record({
        authorization: fc.oneof(
          { weight: 30, arbitrary: fc.constant(`Bearer ${all}`) },
          { weight: 4, arbitrary: fc.constantFrom(...others.map((key) => `Bearer ${key}`)) },
          {
            weight: 1,
            arbitrary: fc.constantFrom(
              '',
              'Bearer',
              'Bearer x',
              'Basic eDp4',
              `Bearer ${all}x`,
              `${all}`,
              'Bearer ü',
            ),
          },
        ),
        'idempotency-key': rarely(
          4,
          fc.oneof(
            { weight: 4, arbitrary: fc.integer({ min: 0, max: 30 }).map((number) => `key-${number}`) },
            {
              weight: 1,
              arbitrary: fc.constantFrom('', '""', '"a"', '"', 'a b', 'ü', 'x'.repeat(255), 'x'.repeat(256)),
            },
          ),
        ),
        'content-type': rarely(
          30,
          fc.constantFrom(
            'application/json; charset=utf-8',
            'text/plain',
            'application/x-www-form-urlencoded',
            'application/json; charset=latin1',
            'multipart/form-data; boundary=x',
            '',
          ),
        ),
        accept: rarely(
          5,
          fc.constantFrom(
            'application/json',
            'text/event-stream',
            'text/plain',
            '*/*',
            'image/png',
            'text/event-stream;q=0, ',
          ),
        ),
        'last-event-id': parameters.some(({ name }) => name === 'Last-Event-ID')
          ? rarely(3, fc.constantFrom('0', '5', '00', '-1', '1e3', 'x', '99999999999999999999'))
          : fc.constant(undefined),
        'content-encoding': rarely(60, fc.constantFrom('identity', 'gzip', 'x')),
        'transfer-encoding': method === 'GET' ? fc.constant(undefined) : rarely(10, fc.constant('chunked')),
        origin: rarely(30, fc.constant('https://example.org')),
        cookie: rarely(30, fc.constantFrom('a=b', '=;;"', 'ü')),
        range: rarely(30, fc.constant('bytes=0-1')),
        'if-none-match': rarely(30, fc.constant('*')),
        'x-http-method-override': rarely(30, fc.constant('DELETE')),
      })
      .map((headers) =>
        Object.fromEntries(
          Object.entries(headers).flatMap(([name, value]) => (value === undefined ? [] : [[name, value]])),
        ),
      );
  }

  function bodyOf(schema: JsonSchema | undefined, method: string): Arbitrary<Body> {
    const none = fc.constant<Body>({ text: undefined, value: undefined, isPlain: true });
    if (method === 'GET')
      return rarely(30, fc.constant<Body>({ text: '{}', value: undefined, isPlain: true })).map(orNone);
    const json = (value: unknown): Body => ({
      text: JSON.stringify(value),
      value,
      isPlain: isPlainJson(value),
    });
    const odd = fc.oneof(
      ODD_JSON.map(json),
      fc.constantFrom(...ODD_BODIES).map((text): Body => ({ text, value: undefined, isPlain: false })),
      fc
        .string({ unit: 'binary', maxLength: 40 })
        .map((text): Body => ({ text, value: undefined, isPlain: false })),
    );
    if (schema === undefined) {
      return fc.oneof(
        { weight: 8, arbitrary: none },
        { weight: 3, arbitrary: fc.constant(json({})) },
        { weight: 1, arbitrary: odd },
      );
    }
    const good = values.of('body', schema);
    const bent = fc
      .tuple(
        good,
        fc.constantFrom(...Object.keys(schema.properties ?? {}), 'ref ', 'REF', 'constructor'),
        rarely(2, ODD_JSON),
      )
      .map(([value, name, instead]) => {
        const { [name]: _dropped, ...rest } = Object(value) as Record<string, unknown>;
        return instead === undefined ? rest : { ...rest, [name]: instead };
      });
    return fc.oneof(
      { weight: 12, arbitrary: good.map(json) },
      { weight: 6, arbitrary: bent.map(json) },
      { weight: 1, arbitrary: none },
      { weight: 2, arbitrary: odd },
    );
  }
}

interface Body {
  text: string | undefined;
  value: unknown;
  /** JSON whose syntax no rule is against. */
  isPlain: boolean;
}

function orNone(body: Body | undefined): Body {
  return body ?? { text: undefined, value: undefined, isPlain: true };
}

interface Allows {
  query: Map<string, ValidateFunction>;
  requiredQuery: string[];
  idempotencyKey: ValidateFunction | undefined;
  body: ValidateFunction | undefined;
  needsBody: boolean;
}

function isAllowed(
  { query: validators, requiredQuery, idempotencyKey, body: validateBody, needsBody }: Allows,
  query: [string, string][],
  headers: Record<string, string>,
  body: unknown,
  method: string,
): boolean {
  const key = headers['idempotency-key'];
  if (key !== undefined && idempotencyKey?.(key) === false) return false;
  const texts = Map.groupBy(query, ([name]) => name);
  for (const name of requiredQuery) if (!texts.has(name)) return false;
  for (const [name, pairs] of texts) {
    const validate = validators.get(name);
    if (
      validate === undefined ||
      !validate(
        queryValue(
          validate.schema as JsonSchema,
          pairs.map(([, text]) => text),
        ),
      )
    )
      return false;
  }
  if (method === 'GET') return true;
  if (body === undefined) return !needsBody;
  if (validateBody === undefined)
    return (
      typeof body === 'object' && body !== null && !Array.isArray(body) && Object.keys(body).length === 0
    );
  return validateBody(body);
}

/** As OpenAPI's `form` style has it: what a text in a query stands for. */
function queryValue({ type, items }: JsonSchema, texts: string[]): unknown {
  if (items !== undefined) return texts;
  const [text = '', ...more] = texts;
  if (more.length > 0) return texts;
  return type === 'integer' && /^(0|[1-9]\d*)$/.test(text) ? Math.min(Number(text), Number.MAX_VALUE) : text;
}

/** What can be judged by the description alone: everything but syntax, of HTTP and of JSON. */
function isSyntaxPlain(query: [string, string][], headers: Record<string, string>, body: Body): boolean {
  const type = headers['content-type'] ?? 'application/json';
  return (
    body.isPlain &&
    query.every(([name, value]) => !`${name}${value}`.includes('\0')) &&
    /^application\/json(; charset=utf-8)?$/.test(type) &&
    (headers['content-encoding'] ?? 'identity') === 'identity' &&
    (headers['last-event-id'] === undefined || /^(0|[1-9]\d{0,14})$/.test(headers['last-event-id']))
  );
}

function isPlainJson(value: unknown): boolean {
  const text = JSON.stringify(value) ?? '';
  return !/\\u0000|\\ud[89a-f]|__proto__|prototype/i.test(text) && Buffer.byteLength(text) < 65_000;
}

/** Mostly undefined: one in `times` has a value. */
function rarely<Value>(times: number, arbitrary: Arbitrary<Value>): Arbitrary<Value | undefined> {
  return fc.oneof({ weight: times - 1, arbitrary: fc.constant(undefined) }, { weight: 1, arbitrary });
}

const ODD_TEXT = fc.oneof(
  fc.constantFrom(
    '',
    ' ',
    '0',
    '-1',
    '1e9',
    '٣',
    'null',
    'true',
    '..',
    '../../etc/passwd',
    'prj_',
    'prj_0',
    'dpl_x y',
    "' OR 1=1 --",
    '<script>',
    '\u202e',
    '\0',
    '\r\nX: y',
    '🚢',
    '2026-02-30T00:00:00Z',
    '9'.repeat(400),
    'x'.repeat(3000),
  ),
  fc.string({ unit: 'grapheme', maxLength: 30 }),
);

const ODD_JSON: Arbitrary<unknown> = fc.oneof(
  fc.constantFrom(
    null,
    true,
    0,
    -0,
    1.5,
    1e308,
    -1,
    2 ** 53,
    '',
    [],
    {},
    [[]],
    { a: {} },
    'HEAD',
    '\0',
    '\ud800',
    ['deployment.failed', 'deployment.failed'],
  ),
  ODD_TEXT,
  fc.jsonValue({ maxDepth: 3 }),
);

const ODD_BODIES = [
  '',
  ' ',
  '{',
  '{"ref":"main"',
  '{"ref":"main"} x',
  '{"ref":"main","ref":"main"}',
  '{"__proto__":{"x":1}}',
  '{"constructor":{"prototype":{}}}',
  '[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]',
  '{"ref":"\\u0000"}',
  '{"ref":"\\ud800"}',
  '\ufeff{}',
  'ref=main',
  'NaN',
  '1e999',
  `{"ref":"${'x'.repeat(70_000)}"}`,
  `{"url":"https://example.org/${'x'.repeat(30_000)}","events":[]}`,
];

const requestsOfNothing: Arbitrary<FuzzRequest> = fc
  .record({
    method: fc.constantFrom('GET', 'POST', 'PUT', 'PATCH', 'DELETE', 'HEAD', 'OPTIONS', 'PROPFIND'),
    path: fc.oneof(
      fc.constantFrom(
        '/',
        '/v2',
        '/v2/',
        '/v1/projects',
        '/v2/projects/',
        '//v2/projects',
        '/V2/projects',
        '/v2/projects/%2e%2e',
        '/docs/',
        '/docs',
        '/docs/docs.css',
        '/healthz',
        '/readyz',
        '/v2/openapi.json',
      ),
      ODD_TEXT.map((text) => `/${encodeURIComponent(text)}`),
      ODD_TEXT.map((text) => `/v2/projects/${encodeURIComponent(text)}`),
    ),
  })
  .map(({ method, path }) => ({
    operation: '',
    method,
    path,
    headers: {},
    body: undefined,
    verdict: 'unknown',
  }));

interface Values {
  id(name: string): Arbitrary<string>;
  cursor: Arbitrary<string>;
  /** What `schema` allows. */
  of(name: string, schema: JsonSchema): Arbitrary<unknown>;
}

function valuesFrom(pool: Pool, urls: readonly string[]): Values {
  const prefixes = ['prj', 'dpl', 'whk', 'dlv'];
  const seen = (prefix: string): Arbitrary<string> =>
    fc.nat().map((number) => {
      const ids = pool.ids.get(prefix) ?? [];
      return ids[number % Math.max(1, ids.length)] ?? `${prefix}_0`;
    });
  const unseen = fc.constantFrom(...prefixes).map((prefix) => `${prefix}_${'0'.repeat(22)}`);
  const PREFIX_OF: Record<string, string> = {
    project_id: 'prj',
    deployment_id: 'dpl',
    webhook_id: 'whk',
    delivery_id: 'dlv',
  };
  const refs = fc
    .array(fc.constantFrom('main', 'v1', '.', '/', '-', '_', '@', 'release', '#', '=', '+', ',', '9'), {
      minLength: 1,
      maxLength: 6,
    })
    .map((parts) => parts.join(''))
    .filter((text) => parseRef(text).ok);
  const texts = fc
    .string({ unit: 'grapheme', minLength: 1, maxLength: 12 })
    .filter((text) => !text.includes('\0'));

  return {
    id: (name) =>
      fc.oneof(
        { weight: 10, arbitrary: seen(PREFIX_OF[name] ?? 'prj') },
        { weight: 1, arbitrary: unseen },
        { weight: 1, arbitrary: seen('whk') },
      ),
    cursor: fc.nat().map((number) => pool.cursors[number % Math.max(1, pool.cursors.length)] ?? 'none'),
    of,
  };

  function of(name: string, schema: JsonSchema): Arbitrary<unknown> {
    const {
      type = [],
      enum: allowed,
      const: only,
      properties,
      required = [],
      items,
      format,
      pattern,
    } = schema;
    if (only !== undefined) return fc.constant(only);
    if (allowed !== undefined) return fc.constantFrom(...allowed);
    if (name === 'project_id') return seen('prj');
    if (name === 'ref') return refs;
    if (name === 'url') return fc.constantFrom(...urls);
    if (format === 'date-time') return MOMENTS;
    if (pattern !== undefined) throw new Error(`nothing here makes values of ${pattern}`);
    const kinds = [type].flat();
    return fc.oneof(...kinds.map((kind) => ofKind(kind)));

    function ofKind(kind: string): Arbitrary<unknown> {
      switch (kind) {
        case 'null':
          return fc.constant(null);
        case 'boolean':
          return fc.boolean();
        case 'integer':
          return fc.integer({ min: schema.minimum ?? 0, max: Math.min(schema.maximum ?? 10_000, 2 ** 31) });
        case 'string':
          return fc.oneof(
            { weight: 5, arbitrary: texts },
            { weight: 1, arbitrary: longestAndShortest(schema) },
          );
        case 'array':
          return schema.uniqueItems === true
            ? fc.uniqueArray(of('', items ?? {}), { minLength: schema.minItems ?? 0, maxLength: 5 })
            : fc.array(of('', items ?? {}), { minLength: schema.minItems ?? 0, maxLength: 5 });
        case 'object':
          return properties === undefined
            ? mapsOf(schema)
            : fc
                .record(
                  Object.fromEntries(
                    Object.entries(properties).map(([field, inner]) => [field, of(field, inner)]),
                  ),
                  {
                    requiredKeys: required,
                  },
                )
                .filter((value) => Object.keys(value).length >= (Number(schema['minProperties']) || 0));
        default:
          throw new Error(`nothing here makes values of the type ${kind}`);
      }
    }
  }

  function mapsOf(schema: JsonSchema): Arbitrary<unknown> {
    const { additionalProperties } = schema;
    const inner = typeof additionalProperties === 'object' ? additionalProperties : {};
    return fc.dictionary(
      fc.stringMatching(/^[A-Za-z_][A-Za-z0-9_]{0,20}$/).filter((name) => !/proto/.test(name)),
      of('', inner),
      { maxKeys: 4 },
    );
  }
}

/** The bounds count characters, not the two halves that some have in UTF-16. */
function longestAndShortest({ minLength = 0, maxLength = 100 }: JsonSchema): Arbitrary<string> {
  return fc.constantFrom('x'.repeat(minLength), 'x'.repeat(maxLength), '🚢'.repeat(maxLength));
}

const MOMENTS = fc.oneof(
  fc.constantFrom(
    '2026-11-21T08:00:00Z',
    '2020-01-01T00:00:00.123456789Z',
    '2026-11-21T08:00:00.5+05:30',
    '1970-01-01T00:00:00Z',
    '9999-12-31T23:59:59Z',
  ),
  fc
    .date({ min: new Date(0), max: new Date('2100-01-01T00:00:00Z'), noInvalidDate: true })
    .map((date) => date.toISOString()),
);

interface FuzzClient {
  /** The answer; of one that follows a log only its beginning. Rejects when the connection fails. */
  send(request: FuzzRequest): Promise<Exchange>;
  close(): void;
}

/** Sends what `fetch` would refuse to send, over kept connections. */
export function createFuzzClient(url: string, connections: number): FuzzClient {
  const agent = new Agent({ keepAlive: true, maxSockets: connections });
  const { hostname, port } = new URL(url);
  return {
    close: () => agent.destroy(),
    send: ({ method, path, headers, body }) =>
      new Promise((resolve, reject) => {
        const outgoing = startRequest(
          { agent, hostname, port, method, path, headers: sendable(headers, body), setDefaultHeaders: true },
          (response) => {
            const exchange = { method, path, status: response.statusCode ?? 0, headers: headersOf(response) };
            const follows = response.headers['content-type']?.startsWith('text/event-stream') === true;
            let text = '';
            response.setEncoding('utf8');
            response.on('data', (chunk: string) => {
              text += chunk;
              if (!follows) return;
              resolve({ ...exchange, body: text });
              response.destroy();
            });
            response.on('end', () => resolve({ ...exchange, body: text }));
            response.on('error', reject);
          },
        );
        outgoing.on('error', reject);
        outgoing.end(body);
      }),
  };
}

function sendable(headers: Record<string, string>, body: string | undefined): Record<string, string> {
  const latin = Object.fromEntries(
    Object.entries(headers).map(([name, value]) => [name, Buffer.from(value, 'utf8').toString('latin1')]),
  );
  if (body === undefined || headers['transfer-encoding'] !== undefined) return latin;
  return { ...latin, 'content-length': String(Buffer.byteLength(body)) };
}

function headersOf({ headers }: IncomingMessage): Headers {
  return new Headers(
    Object.entries(headers).flatMap(([name, value]) =>
      value === undefined ? [] : [[name, String(value)] as [string, string]],
    ),
  );
}
