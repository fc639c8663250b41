import { Ajv2020, type ValidateFunction } from 'ajv/dist/2020.js';
import formats from 'ajv-formats';
import type { JsonSchema } from '../../src/http/json-schema.ts';
import {
  type Header,
  METHODS,
  type OpenApiDocument,
  type Operation,
  type Response,
} from '../../src/http/openapi-types.ts';

/** A request and what came back for it, as far as a contract speaks of it. */
export interface Exchange {
  method: string;
  /** With the query, as it was sent. */
  path: string;
  status: number;
  headers: Headers;
  body: string;
}

export interface Contract {
  document: OpenApiDocument;
  /** What in the answer the description does not allow; empty when all is well. */
  problems(exchange: Exchange): string[];
}

/** Carried by every answer, and so said in words only. */
const COMMON_HEADERS = { 'cache-control': 'no-store', 'x-content-type-options': 'nosniff' };

/** What any HTTP server sends. */
const TRANSPORT_HEADERS = [
  'connection',
  'content-length',
  'content-type',
  'date',
  'keep-alive',
  'transfer-encoding',
];

/**
 * Holds answers against an OpenAPI document: status, headers and body must be described, and a body may have no
 * field that is not. Where the document knows no operation, an error must still have the one shape.
 */
export function createContract(document: OpenApiDocument): Contract {
  const text = JSON.stringify(document);
  const contract = contracts.get(text) ?? contractOf(document);
  contracts.set(text, contract);
  return contract;
}

/** By the text of their documents: servers with the same routes share what is compiled of it. */
const contracts = new Map<string, Contract>();

function contractOf(document: OpenApiDocument): Contract {
  const ajv = new Ajv2020({ allErrors: true, strictTypes: false });
  formats.default(ajv, ['date-time', 'uri', 'uri-reference']);
  for (const [name, schema] of Object.entries(document.components.schemas)) {
    ajv.addSchema(named(closed(schema)), name);
  }
  const validators = new Map<JsonSchema, ValidateFunction>();
  const templates = Object.entries(document.paths).map(([path, item]) => ({
    item,
    pattern: new RegExp(`^${path.replaceAll('.', '\\.').replaceAll(/\{\w+\}/g, '[^/]+')}$`),
  }));

  return { document, problems };

  function problems(exchange: Exchange): string[] {
    // As it was sent: URL would take dot segments out, and so find another operation.
    const [path = ''] = exchange.path.split('?', 1);
    const operation = operationOf(exchange.method, path);
    const common = Object.entries(COMMON_HEADERS)
      .filter(([name, value]) => exchange.headers.get(name) !== value)
      .map(([name, value]) => `${name} is not ${value}`);
    if (operation === undefined) return [...common, ...unknownOperation(exchange)];
    const found = operation.responses[exchange.status];
    if (found === undefined) return [...common, `the status ${exchange.status} is not described`];
    const response = resolved<Response>(found);
    return [
      ...common,
      ...headerProblems(response, exchange.headers),
      ...(exchange.method === 'HEAD' ? [] : bodyProblems(response, exchange)),
      ...codeProblems(exchange, found),
    ];
  }

  function operationOf(method: string, path: string): Operation | undefined {
    const { item } = templates.find(({ pattern }) => pattern.test(path)) ?? {};
    const name = METHODS.find((name) => name === (method === 'HEAD' ? 'get' : method.toLowerCase()));
    return name === undefined ? undefined : item?.[name];
  }

  /** A route of a test's own may answer what it likes, but for errors. */
  function unknownOperation({ method, status, headers, body }: Exchange): string[] {
    const requestId = document.components.headers['X-Request-Id'];
    return [
      ...(requestId === undefined
        ? ['X-Request-Id is not described']
        : headerProblem('X-Request-Id', requestId, headers)),
      ...(status < 400 || method === 'HEAD'
        ? []
        : valueProblems('the body', { $ref: '#/components/schemas/Error' }, parsed(body))),
      ...(status === 405 && !headers.has('allow') ? ['Allow is missing'] : []),
    ];
  }

  function headerProblems({ headers: described = {} }: Response, headers: Headers): string[] {
    const known = new Set(
      [...Object.keys(described), ...Object.keys(COMMON_HEADERS), ...TRANSPORT_HEADERS].map((name) =>
        name.toLowerCase(),
      ),
    );
    return [
      ...[...headers.keys()].filter((name) => !known.has(name)).map((name) => `${name} is not described`),
      ...Object.entries(described).flatMap(([name, header]) =>
        headerProblem(name, resolved<Header>(header), headers),
      ),
    ];
  }

  function headerProblem(name: string, { required = false, schema }: Header, headers: Headers): string[] {
    const value = headers.get(name);
    if (value === null) return required ? [`${name} is missing`] : [];
    return valueProblems(name, schema, schema.type === 'integer' ? Number(value) : value);
  }

  function bodyProblems({ content }: Response, { headers, body }: Exchange): string[] {
    const type = headers.get('content-type');
    if (content === undefined) {
      return [
        ...(body === '' ? [] : ['there is a body']),
        ...(type === null ? [] : ['there is a Content-Type']),
      ];
    }
    const [mediaType = '', ...parameters] = type?.split('; ') ?? [];
    const described = content[mediaType];
    if (described === undefined) return [`the media type ${mediaType} is not described`];
    return [
      ...(parameters.join() === 'charset=utf-8' ? [] : ['the charset is not utf-8']),
      ...valueProblems('the body', described.schema, mediaType === 'application/json' ? parsed(body) : body),
    ];
  }

  /** Errors are described by their code, and one status goes with each. */
  function codeProblems({ method, body }: Exchange, found: object): string[] {
    if (!('$ref' in found) || method === 'HEAD') return [];
    const expected = String(found.$ref).replace('#/components/responses/', '');
    const { error } = Object(parsed(body)) as { error?: { code?: string } };
    return error?.code === expected ? [] : [`the code is ${error?.code}, not ${expected}`];
  }

  function valueProblems(what: string, schema: JsonSchema, value: unknown): string[] {
    let validate = validators.get(schema);
    if (validate === undefined) {
      validate = ajv.compile(named(closed(schema)));
      validators.set(schema, validate);
    }
    if (validate(value)) return [];
    return (validate.errors ?? []).map(
      ({ instancePath, message, params }) => `${what}${instancePath} ${message} ${JSON.stringify(params)}`,
    );
  }

  function resolved<Target>(value: Target | { $ref: string }): Target {
    if (typeof value !== 'object' || value === null || !('$ref' in value)) return value;
    const [, , kind = '', name = ''] = value.$ref.split('/');
    const target = (document.components as unknown as Record<string, Record<string, Target>>)[kind]?.[name];
    if (target === undefined) throw new Error(`${value.$ref} leads nowhere`);
    return target;
  }
}

/** What the service at `url` promises at `/v2/openapi.json`. */
export async function contractAt(url: string): Promise<Contract> {
  const response = await fetch(`${url}/v2/openapi.json`);
  return createContract((await response.json()) as OpenApiDocument);
}

export interface RequestOptions {
  key?: string;
  /** Sent as JSON unless it is text already. */
  body?: unknown;
  headers?: Record<string, string>;
}

/** One request through `fetch`. Throws if the answer is against the contract, which is asked for after it. */
export async function fetchUnder(
  contractOf: () => Contract | undefined | Promise<Contract>,
  url: string,
  method: string,
  path: string,
  { key, body, headers = {} }: RequestOptions = {},
): Promise<{ status: number; headers: Headers; text: string }> {
  const response = await fetch(`${url}${path}`, {
    method,
    headers: {
      ...(key === undefined ? {} : { authorization: `Bearer ${key}` }),
      ...(body === undefined ? {} : { 'content-type': 'application/json' }),
      ...headers,
    },
    ...(body === undefined ? {} : { body: typeof body === 'string' ? body : JSON.stringify(body) }),
  });
  const { status, headers: answered } = response;
  const text = await response.text();
  const contract = await contractOf();
  const problems = contract?.problems({ method, path, status, headers: answered, body: text }) ?? [];
  if (problems.length === 0) return { status, headers: answered, text };
  throw new Error(
    `${method} ${path} answers against the description: ${problems.join('; ')}\n${status} ${text}`,
  );
}

/** What is described may grow later; what is answered today is all described. */
function closed<Value>(value: Value): Value {
  if (Array.isArray(value)) return value.map(closed) as Value;
  if (typeof value !== 'object' || value === null) return value;
  const copy = Object.fromEntries(Object.entries(value).map(([name, item]) => [name, closed(item)]));
  if (isObjectSchema(value))
    return { ...copy, additionalProperties: value.additionalProperties ?? false } as Value;
  return copy as Value;
}

function isObjectSchema(value: object): value is JsonSchema {
  return 'properties' in value && 'type' in value;
}

/** Schemas are known to the validator by their names alone. */
function named(schema: JsonSchema): JsonSchema {
  return JSON.parse(JSON.stringify(schema).replaceAll('"#/components/schemas/', '"'));
}

function parsed(body: string): unknown {
  try {
    return JSON.parse(body);
  } catch {
    return undefined;
  }
}
