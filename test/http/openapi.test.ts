import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { createConfig, lintFromString } from '@redocly/openapi-core';
import { Ajv2020 } from 'ajv/dist/2020.js';
import formats from 'ajv-formats';
import fc from 'fast-check';
import t from 'tap';
import { parseWebhookUrl } from '../../src/address.ts';
import { signedHeaders } from '../../src/deliver/sign.ts';
import {
  EVENT_TYPES,
  type Page,
  type Project,
  parseRef,
  parseTimestamp,
  SCOPES,
  TIMESTAMP_FORM,
} from '../../src/domain.ts';
import { realEffects } from '../../src/effects.ts';
import { STATUS_OF_CODE } from '../../src/errors.ts';
import { EXAMPLE_IDS, type JsonSchema, REF_JSON_SCHEMA } from '../../src/http/json-schema.ts';
import { describeApi } from '../../src/http/openapi.ts';
import { METHODS, type OpenApiDocument, type Operation } from '../../src/http/openapi-types.ts';
import { createPages } from '../../src/http/pages.ts';
import { projects } from '../../src/http/projects.ts';
import { exampleOf, pageSchema, RESOURCES, type ResourceName } from '../../src/http/resources.ts';
import { idempotencyKey } from '../../src/http/validation.ts';
import { urlJsonSchema } from '../../src/http/webhooks.ts';
import { endedAlready } from '../../src/store/transitions.ts';
import { createContract, type Exchange } from '../helpers/contract.ts';
import { requestJson, startHttp } from '../helpers/http.ts';
import { startWholeService } from '../helpers/whole-service.ts';
import refs from '../vectors/refs.json' with { type: 'json' };

const PAGES = createPages(Buffer.alloc(32), realEffects);

/** All endpoints that the description must have. */
const ENDPOINTS = [
  'DELETE /v2/webhooks/{webhook_id}',
  'GET /healthz',
  'GET /readyz',
  'GET /v2/deliveries/{delivery_id}',
  'GET /v2/deployments',
  'GET /v2/deployments/{deployment_id}',
  'GET /v2/deployments/{deployment_id}/logs',
  'GET /v2/openapi.json',
  'GET /v2/projects',
  'GET /v2/projects/{project_id}',
  'GET /v2/projects/{project_id}/deployments',
  'GET /v2/webhooks',
  'GET /v2/webhooks/{webhook_id}',
  'GET /v2/webhooks/{webhook_id}/deliveries',
  'PATCH /v2/webhooks/{webhook_id}',
  'POST /v2/deliveries/{delivery_id}/redeliver',
  'POST /v2/deployments/{deployment_id}/cancel',
  'POST /v2/deployments/{deployment_id}/redeploy',
  'POST /v2/deployments/{deployment_id}/report',
  'POST /v2/projects/{project_id}/deployments',
  'POST /v2/webhooks',
  'POST /v2/webhooks/{webhook_id}/ping',
  'POST /v2/webhooks/{webhook_id}/replay',
  'POST /v2/webhooks/{webhook_id}/rotate',
];

const HTTP = join(import.meta.dirname, '../../src/http');

t.test('the OpenAPI description', async (t) => {
  const { contract, url } = await startWholeService(t);
  const { document } = contract;
  const operations = operationsOf(document);

  t.test('has every endpoint', async (t) => {
    t.strictSame(operations.map(({ name }) => name).sort(), ENDPOINTS);
  });

  t.test('has every route that src/http/ has: one without `routeOptions` fails here', async (t) => {
    const sources = readdirSync(HTTP).map((name) => readFileSync(join(HTTP, name), 'utf8'));
    const routes = [...sources.join().matchAll(/method: '(\w+)',\s+path: '(\/v2\/[^']+)'/g)];
    const described = operations.map(({ name }) => name).filter((name) => name.includes(' /v2/'));
    t.strictSame(routes.map(([, method, path]) => `${method} ${path}`).sort(), described.sort());
  });

  t.test('passes the recommended rules of Redocly, warnings included', async (t) => {
    const config = await createConfig({ extends: ['recommended'] });
    const problems = await lintFromString({
      source: JSON.stringify(document),
      absoluteRef: '/openapi.json',
      config,
    });
    t.strictSame(
      problems.map(({ ruleId, message, location }) => `${ruleId}: ${message} ${location[0]?.pointer}`),
      [],
    );
  });

  t.test('has no pattern with lookahead or lookbehind, which Go and Rust cannot compile', async (t) => {
    t.match(JSON.stringify(document), /"pattern":"[^"]*\(\?:/);
    t.notMatch(JSON.stringify(document), /"pattern":"(?:[^"\\]|\\.)*\(\?<?[=!]/);
  });

  t.test('has a schema for Idempotency-Key that accepts exactly what the service accepts', async (t) => {
    const create = document.paths['/v2/projects/{project_id}/deployments']?.post;
    const parameter = create?.parameters?.find(({ name }) => name === 'Idempotency-Key');
    const isKey = new Ajv2020().compile(parameter?.schema ?? false);
    const long = 'k'.repeat(255);
    for (const key of ['k', '"', '"k', 'k"', '"k"', '"""', '!~', long, `"${long}"`]) {
      t.ok(isKey(key) && idempotencyKey({ headers: { 'idempotency-key': key } }), key);
    }
    for (const key of ['', '""', 'a b', 'é', 'a\n', `${long}k`, `"${long}`, `"${long}k"`]) {
      t.notOk(isKey(key), key);
      t.throws(
        () => idempotencyKey({ headers: { 'idempotency-key': key } }),
        { code: 'invalid_request' },
        key,
      );
    }
  });

  t.test('names the scope of every operation but the three that need no key', async (t) => {
    const open = operations.filter(({ operation }) => operation.security.length === 0);
    t.strictSame(
      open.map(({ name }) => name),
      ['GET /healthz', 'GET /readyz', 'GET /v2/openapi.json'],
    );
    const scopes = operations.flatMap(({ operation }) => operation.security.flatMap(({ key = [] }) => key));
    t.strictSame([...new Set(scopes)].sort(), [...SCOPES].sort());
    for (const { name, operation } of operations.filter((one) => !open.includes(one))) {
      t.equal(operation.security[0]?.['key']?.length, 1, name);
      t.match(operation.description, /Needs the scope `[a-z:]+`\.$/, name);
    }
  });

  t.test('lists the errors of every operation: those of all, and those of its kind', async (t) => {
    for (const { name, operation } of operations) {
      const always = ['400', '408', '413', '431', '500', '503'];
      const withKey = operation.security.length === 0 ? [] : ['401', '403', '429'];
      const ofWrites = name.startsWith('GET') ? [] : ['415', '422'];
      const ofOne = name.includes('{') ? ['404'] : [];
      t.strictSame(
        [...always, ...withKey, ...ofWrites, ...ofOne].filter((status) => !(status in operation.responses)),
        [],
        name,
      );
    }
    const answered = new Set(operations.flatMap(({ operation }) => Object.keys(operation.responses)));
    const statuses = new Set(Object.values(STATUS_OF_CODE).map(String));
    // 405 says that a path has no such operation, so no operation answers it.
    t.strictSame(
      [...statuses].filter((status) => !answered.has(status)),
      ['405'],
    );
  });

  t.test('has the parameter Idempotency-Key for every write, and for nothing else', async (t) => {
    for (const { name, operation } of operations) {
      const names = operation.parameters?.map(({ name }) => name) ?? [];
      t.equal(names.includes('Idempotency-Key'), !name.startsWith('GET'), name);
    }
  });

  t.test('has no example for a parameter that may be left out: Swagger UI would send it', async (t) => {
    for (const { name, operation } of operations) {
      const optional = operation.parameters?.filter(({ required }) => required !== true) ?? [];
      t.strictSame(
        optional.filter((parameter) => 'example' in parameter).map(({ name }) => name),
        [],
        name,
      );
    }
  });

  t.test(
    'has the bounds of the outputs of a report, in words too where a schema cannot express them',
    async (t) => {
      const report = document.paths['/v2/deployments/{deployment_id}/report']?.post?.requestBody;
      t.match(report?.content['application/json']?.schema.properties?.['outputs'], {
        propertyNames: { pattern: '^[A-Za-z_][A-Za-z0-9_]{0,63}$', not: { const: '__proto__' } },
        additionalProperties: { type: 'string', maxLength: 4096 },
        maxProperties: 100,
        description:
          /replace all outputs of an earlier report; if they are left out, those stay\..*4096 bytes/,
      });
    },
  );

  t.test('says in words which refs may be deployed, and that URLs come back normalised', async (t) => {
    const create = document.paths['/v2/projects/{project_id}/deployments']?.post?.requestBody;
    t.match(create?.content['application/json']?.schema.properties?.['ref'], {
      description: /letters a-z and A-Z, digits and `\. _ - \/ \+ @ = , #`.*not `HEAD`/,
    });
    t.match(RESOURCES.Webhook.properties?.['url'], {
      description: /`https:\/\/Example\.org` becomes `https:\/\/example\.org\/`/,
    });
    const rules = { allowHttp: false, allowedCidrs: [] };
    t.match(parseWebhookUrl('https://Example.org', rules), { url: 'https://example.org/' });
  });

  t.test('says what differs for projects without a command', async (t) => {
    t.match(document.paths['/v2/projects/{project_id}/deployments']?.post, {
      description: /If it has none, another system carries it out, in an order of its own/,
    });
    t.match(RESOURCES.Project.properties?.['status'], {
      description: /`archived`.*In both, .* that a queued one is `running` is 409/,
    });
  });

  t.test('has an example of 409 with a message that is really sent', async (t) => {
    const conflict = document.components.responses['conflict']?.content?.['application/json'];
    t.match(conflict?.example, { error: { message: endedAlready('succeeded').message } });
  });

  t.test('has every event with its signature headers', async (t) => {
    t.strictSame(Object.keys(document.webhooks).sort(), [...EVENT_TYPES, 'ping'].sort());
    for (const [type, { post }] of Object.entries(document.webhooks)) {
      t.strictSame(
        post?.parameters?.map(({ name }) => name),
        ['Service-Signature', 'webhook-id', 'webhook-timestamp', 'webhook-signature'],
        type,
      );
      t.match(post?.requestBody?.content['application/json']?.example, { type });
    }
  });

  t.test('has valid signatures on its example of an event', async (t) => {
    const { post } = document.webhooks['deployment.succeeded'] ?? {};
    const secret = String(exampleOf('WebhookWithSecret')['signing_secret']);
    const body = JSON.stringify(post?.requestBody?.content['application/json']?.example);
    const headers = Object.fromEntries(
      post?.parameters?.map(({ name, example }) => [name, String(example)]) ?? [],
    );
    const atSeconds = Number(headers['webhook-timestamp']);
    t.strictSame(
      headers,
      signedHeaders({ eventId: JSON.parse(body).id, secrets: [secret], atSeconds, body }),
    );
  });

  t.test('says that a ping is not retried, and that 410 has no effect on it', async (t) => {
    const answers = (type: string) => Object.keys(document.webhooks[type]?.post?.responses ?? {}).sort();
    t.strictSame(answers('deployment.failed'), ['2XX', '410', 'default']);
    t.strictSame(answers('ping'), ['2XX', 'default']);
    t.match(document.webhooks['ping']?.post?.responses['default'], { description: /is not sent again/ });
  });

  t.test('does not take for fixed what options of serve change about deliveries', async (t) => {
    for (const type of [...EVENT_TYPES, 'ping']) {
      t.match(
        document.webhooks[type]?.post?.responses['2XX'],
        { description: /within 10 seconds .*, or the time that the service is set to/ },
        `${type}: --webhook-timeout`,
      );
    }
    t.match(
      document.webhooks['deployment.failed']?.post?.responses['default'],
      { description: /for 24 hours, or the time that the service is set to/ },
      '--webhook-retry-window',
    );
    t.match(
      document.paths['/v2/webhooks']?.post,
      { description: /`https` and public, unless the service is set to allow others/ },
      '--webhook-allow-http, --webhook-allow-cidr',
    );
  });

  t.test('is served as JSON without a key, and rejects unknown parameters', async (t) => {
    const response = await fetch(`${url}/v2/openapi.json`);
    t.equal(response.headers.get('content-type'), 'application/json; charset=utf-8');
    t.strictSame(await response.json(), document);
    const refused = await fetch(`${url}/v2/openapi.json?format=yaml`);
    t.equal(refused.status, 400);
    t.match(await refused.json(), { error: { details: [{ in: 'query', field: 'format' }] } });
  });
});

t.test('the check of answers against the description', async (t) => {
  const { port, server, store } = await startHttp(t, { resources: ({ reads }) => [projects(reads, PAGES)] });
  const contract = createContract(describeApi(server));
  const { secret } = await store.key();
  await store.project();
  const { headers, body } = await requestJson(port, 'GET', '/v2/projects', { key: secret });
  const page = body as Page<Project>;
  const good = {
    method: 'GET',
    path: '/v2/projects?limit=9',
    status: 200,
    headers,
    body: JSON.stringify(page),
  };
  const problems = (changes: Partial<Exchange>): string[] => contract.problems({ ...good, ...changes });
  const changed = (change: (project: Record<string, unknown>) => void): string => {
    const copy = structuredClone(page);
    for (const project of copy.data) change(Object(project));
    return JSON.stringify(copy);
  };
  const withHeader = (name: string, value: string | null): Headers => {
    const copy = new Headers(headers);
    if (value === null) copy.delete(name);
    else copy.set(name, value);
    return copy;
  };

  t.test('accepts a real answer', async (t) => {
    t.strictSame(problems({}), []);
    t.strictSame(problems({ method: 'HEAD', body: '' }), []);
  });

  const wrong: [what: string, changes: Partial<Exchange>, says: RegExp][] = [
    ['a status that is not described', { status: 202 }, /202 is not described/],
    [
      'a field that is not described',
      { body: changed((project) => Object.assign(project, { x: 1 })) },
      /"x"/,
    ],
    ['a field that is missing', { body: changed((project) => delete project['name']) }, /'name'/],
    [
      'a field of another type',
      { body: changed((project) => Object.assign(project, { name: 1 })) },
      /name must be string/,
    ],
    [
      'an id of another form',
      { body: changed((project) => Object.assign(project, { id: 'prj-1' })) },
      /id must match/,
    ],
    ['another status', { body: changed((project) => Object.assign(project, { status: 'gone' })) }, /status/],
    ['a body that is not JSON', { body: 'oops' }, /the body must be object/],
    ['an empty body', { body: '' }, /the body must be object/],
    [
      'another media type',
      { headers: withHeader('content-type', 'text/html') },
      /text\/html is not described/,
    ],
    ['another charset', { headers: withHeader('content-type', 'application/json') }, /charset/],
    ['a header that is not described', { headers: withHeader('server', 'x') }, /server is not described/],
    ['a header that is missing', { headers: withHeader('x-request-id', null) }, /X-Request-Id is missing/],
    ['a header of another form', { headers: withHeader('x-request-id', '7') }, /X-Request-Id must match/],
    ['an answer that may be cached', { headers: withHeader('cache-control', 'public') }, /cache-control/],
    ['an error code of another status', { status: 403, body: error('conflict') }, /conflict, not forbidden/],
    ['an error of another shape', { status: 403, body: '{"error":"forbidden"}' }, /must be object/],
    ['no error for an unknown path', { path: '/v2/nothing', status: 404, body: '{}' }, /'error'/],
    ['405 without Allow', { method: 'PUT', status: 405, body: error('method_not_allowed') }, /Allow/],
  ];
  for (const [what, changes, says] of wrong) {
    t.test(`rejects ${what}`, async (t) => {
      t.match(problems(changes).join('; '), says);
    });
  }
});

t.test('the pattern for webhook URLs agrees with parseWebhookUrl', async (t) => {
  for (const allowHttp of [true, false]) {
    const rules = { allowHttp, allowedCidrs: [] };
    const pattern = new RegExp(urlJsonSchema(rules).pattern ?? '', 'u');
    for (const url of [
      'https://example.com',
      'HTTPS://é.example:8443/ä?b=c',
      'https://[2606:4700::1111]/',
      'https://a.example?b=@',
    ])
      t.ok(pattern.test(url) && parseWebhookUrl(url, rules).ok, url);
    t.equal(pattern.test('http://example.com/'), allowHttp);
    for (const form of [
      '',
      'x',
      'ftp://a.example',
      'https:///a',
      'https:a.example',
      'https://b@a.example/',
      'https://a.example/#b',
    ])
      t.notOk(pattern.test(form) || parseWebhookUrl(form, rules).ok, form);
    for (const form of [
      ' https://a.example',
      'https://a.example/b c',
      'https://a.example\\b',
      'https://a.example\n',
    ])
      t.notOk(pattern.test(form) || parseWebhookUrl(form, rules).ok, form);
  }
});

t.test('the schema for refs accepts exactly what parseRef accepts', async (t) => {
  const isRef = new Ajv2020().compile(REF_JSON_SCHEMA);
  for (const text of [...refs.valid, ...refs.invalid.map(({ ref }) => ref)]) {
    t.equal(isRef(text), parseRef(text).ok, JSON.stringify(text));
  }
  const part = fc.constantFrom(
    'a',
    'Z',
    '9',
    '_',
    '.',
    '/',
    '-',
    '+',
    '@',
    '=',
    ',',
    '#',
    '{',
    ' ',
    '\n',
    'é',
    '.lock',
    'HEAD',
  );
  fc.assert(
    fc.property(fc.array(part, { maxLength: 8 }), (parts) => {
      const text = parts.join('');
      return isRef(text) === parseRef(text).ok;
    }),
    { numRuns: 20_000 },
  );
});

t.test('the schema for times accepts what parseTimestamp accepts, so no leap seconds', async (t) => {
  const ajv = new Ajv2020();
  formats.default(ajv, ['date-time']);
  const isTime = ajv.compile({ type: 'string', format: 'date-time', pattern: TIMESTAMP_FORM.source });
  const rows: [text: string, accepted: boolean][] = [
    ['2026-01-31T12:00:00Z', true],
    ['2026-01-31T12:00:00.5Z', true],
    ['2026-12-31T23:59:59.123456789-23:59', true],
    ['2026-01-31T12:00:00.Z', false],
    [' 2026-01-31T12:00:00Z', false],
    ['2026-01-31T12:00:00Z ', false],
    ['2016-12-31T23:59:60Z', false],
    ['2017-01-01T00:59:60+01:00', false],
    ['2026-02-29T12:00:00Z', false],
    ['2026-01-31T24:00:00Z', false],
    ['2026-01-31T12:00:00+24:00', false],
    ['2026-01-31t12:00:00z', false],
  ];
  for (const [text, accepted] of rows) {
    t.equal(isTime(text), accepted, text);
    t.equal(parseTimestamp(text, Math.floor) !== undefined, accepted, text);
  }
});

function operationsOf({ paths }: OpenApiDocument): { name: string; operation: Operation }[] {
  return Object.entries(paths).flatMap(([path, item]) =>
    METHODS.flatMap((method) => {
      const operation = item[method];
      return operation === undefined ? [] : [{ name: `${method.toUpperCase()} ${path}`, operation }];
    }),
  );
}

function error(code: string): string {
  return JSON.stringify({ error: { code, message: 'm', request_id: EXAMPLE_IDS.req } });
}

t.test('every field of every answer is required, but for the details of an error', async (t) => {
  const look = (name: string, schema: JsonSchema): void => {
    const { properties = {}, required = [], items } = schema;
    const optional = Object.keys(properties).filter((field) => !required.includes(field));
    t.strictSame(optional, name === 'Error.error' ? ['details'] : [], name);
    for (const [field, one] of Object.entries(properties)) look(`${name}.${field}`, one);
    if (items !== undefined) look(`${name}[]`, items);
  };
  for (const [name, schema] of Object.entries(RESOURCES)) look(name, schema);
  look('page', pageSchema('Project'));
});

t.test('the schemas of answers refuse values that no answer has', async (t) => {
  const ajv = new Ajv2020({ strictTypes: false });
  formats.default(ajv, ['date-time', 'uri']);
  for (const [name, schema] of Object.entries(RESOURCES)) {
    ajv.addSchema({ ...schema, $id: `/components/schemas/${name}` });
  }
  const error = exampleOf('Error')['error'] as { details: object[] };
  const withDetails = (details: object[]) => ({ ...error, details });
  const rows: [name: ResourceName, field: string, ...refused: unknown[]][] = [
    [
      'Project',
      'created_at',
      '2026-11-01T08:00:00Z',
      '2026-13-01T08:00:00.000Z',
      '\n2026-11-01T08:00:00.000Z',
    ],
    ['Project', 'status', 'deleted'],
    ['Deployment', 'status', 'done'],
    ['Deployment', 'reason', 'bad luck'],
    ['Deployment', 'trigger', 'cron'],
    ['Deployment', 'duration_ms', -1, 0.5],
    ['Deployment', 'queue_position', 0],
    ['Deployment', 'outputs', { url: 1 }],
    ['Webhook', 'events', [], ['deployment.lost'], ['deployment.failed', 'deployment.failed']],
    ['Webhook', 'status', 'held'],
    ['WebhookWithSecret', 'signing_secret', 'secret'],
    ['Event', 'type', 'deployment.lost'],
    ['Ping', 'type', 'pong'],
    ['Attempt', 'number', 0],
    ['Attempt', 'trigger', 'cron'],
    ['Delivery', 'event_type', 'deployment.lost'],
    ['Delivery', 'status', 'lost'],
    ['Replay', 'status', 'lost'],
    ['Error', 'error', { ...error, code: 'bad_luck' }, withDetails([]), withDetails([{}])],
    ['Error', 'error', withDetails([{ ...error.details[0], in: 'cookie' }])],
    ['Health', 'status', 'ill'],
  ];
  for (const [name, field, ...refused] of rows) {
    const example = exampleOf(name);
    t.ok(ajv.validate(`/components/schemas/${name}`, example), name);
    for (const value of refused) {
      const isValid = ajv.validate(`/components/schemas/${name}`, { ...example, [field]: value });
      t.notOk(isValid, `${name}.${field}: ${JSON.stringify(value)}`);
    }
  }
});
