import type { RequestRoute } from '@hapi/hapi';
import Joi from 'joi';
import type { IdPrefix } from '../domain.ts';
import { STATUS_OF_CODE } from '../errors.ts';
import { EXAMPLE_IDS, idJsonSchema, type JsonSchema } from './json-schema.ts';
import { type HEADERS, LIMITED, type RouteError } from './openapi-text.ts';
import type { Operation, Parameter, Reference, Response } from './openapi-types.ts';
import { exampleOf, schemaReference } from './resources.ts';
import type { ResponseDescription, RouteDescription } from './route-options.ts';

/** Describes a route: its own description, what hapi knows of it, and what all routes of its kind have in common. */
export function operationOf(
  route: RequestRoute,
  { scope, operationId, summary, description, responses, errors = {}, headers = {} }: RouteDescription,
  tag: string,
): Operation {
  const isWrite = route.method !== 'get';
  const { query, payload } = route.settings.plugins?.input ?? {};
  const body = isWrite ? requestBody(payload) : undefined;
  const parameters = [
    ...pathParameters(route.path),
    ...queryParameters(query),
    ...(isWrite ? [IDEMPOTENCY_KEY] : []),
    ...Object.entries(headers).map(([name, header]): Parameter => ({ name, in: 'header', ...header })),
  ];
  const needs = scope === null ? undefined : `Needs the scope \`${scope}\`.`;
  const text = [description, needs].filter(Boolean).join('\n\n');
  const codes: RouteError[] = [
    'invalid_request',
    ...(scope === null ? [] : (['unauthorized', 'forbidden', 'rate_limited'] as const)),
    ...(route.path.includes('{') ? (['not_found'] as const) : []),
    ...(isWrite ? (['unsupported_media_type', 'idempotency_key_reused'] as const) : []),
    'request_timeout',
    'payload_too_large',
    'headers_too_large',
    'internal_error',
    'unavailable',
    ...(Object.keys(errors) as RouteError[]),
  ];
  return {
    operationId,
    summary,
    ...(text === '' ? {} : { description: text }),
    tags: [tag],
    security: scope === null ? [] : [{ key: [scope] }],
    ...(parameters.length === 0 ? {} : { parameters }),
    ...(body === undefined ? {} : { requestBody: body }),
    responses: Object.fromEntries([
      ...Object.entries(responses).map(([status, response]) => [
        status,
        success(response, { isLimited: scope !== null, isWrite, isCreated: status === '201' }),
      ]),
      ...codes.map((code) => [
        STATUS_OF_CODE[code],
        {
          $ref: `#/components/responses/${code}`,
          ...(errors[code] === undefined ? {} : { description: errors[code] }),
        } satisfies Reference,
      ]),
    ]),
  };
}

/** What kind of id each path parameter is. */
const PATH_IDS: Record<string, IdPrefix> = {
  project_id: 'prj',
  deployment_id: 'dpl',
  webhook_id: 'whk',
  delivery_id: 'dlv',
};

function pathParameters(path: string): Parameter[] {
  return [...path.matchAll(/\{(\w+)\}/g)].map(([, name = '']) => {
    const prefix = PATH_IDS[name];
    if (prefix === undefined) return { name, in: 'path', required: true, schema: { type: 'string' } };
    return { name, in: 'path', required: true, schema: idJsonSchema(prefix), example: EXAMPLE_IDS[prefix] };
  });
}

function queryParameters(query: unknown): Parameter[] {
  if (!Joi.isSchema(query)) return [];
  const { properties = {} } = inputSchema(query);
  return Object.entries(properties).map(([name, { description, ...schema }]) => ({
    name,
    in: 'query',
    ...(description === undefined ? {} : { description }),
    schema,
  }));
}

/** Undefined where no body is expected. */
function requestBody(payload: unknown): Operation['requestBody'] {
  if (!Joi.isSchema(payload)) return undefined;
  const { examples: [example] = [], ...schema } = inputSchema(payload);
  return {
    required: (payload.describe() as JoiDescription).flags?.presence === 'required',
    content: { 'application/json': { schema, example } },
  };
}

/**
 * A joi schema as JSON Schema: converted by joi or, where a custom rule checks in code, given by its
 * `.meta({ jsonSchema })`. joi's conversion leaves out examples; they are added.
 */
function inputSchema(schema: Joi.Schema): JsonSchema {
  return annotated(schema['~standard'].jsonSchema.input({ target: 'draft-2020-12' }), schema.describe());
}

/** The parts of `Joi.Schema.describe()` that are used here. */
interface JoiDescription {
  flags?: { presence?: string };
  metas?: { jsonSchema?: JsonSchema }[];
  examples?: unknown[];
  keys?: Record<string, JoiDescription>;
}

function annotated(generated: JsonSchema, { metas = [], examples, keys }: JoiDescription): JsonSchema {
  const ours = metas.find(({ jsonSchema }) => jsonSchema !== undefined)?.jsonSchema;
  const { description, default: defaultValue } = generated;
  const schema: JsonSchema =
    ours === undefined
      ? { ...generated }
      : {
          ...ours,
          // `.allow(null)` is visible only in joi's conversion.
          ...([generated.type].flat().includes('null') ? { type: [ours.type ?? [], 'null'].flat() } : {}),
          ...(description === undefined ? {} : { description }),
          ...(defaultValue === undefined ? {} : { default: defaultValue }),
        };
  if (examples !== undefined) schema.examples = examples;
  const { properties } = schema;
  if (properties !== undefined && keys !== undefined) {
    schema.properties = Object.fromEntries(
      Object.entries(properties).map(([name, property]) => [name, annotated(property, keys[name] ?? {})]),
    );
  }
  return schema;
}

function success(
  { description, resource, pageOf, content, example, headers }: ResponseDescription,
  { isLimited, isWrite, isCreated }: { isLimited: boolean; isWrite: boolean; isCreated: boolean },
): Response {
  const body =
    resource !== undefined
      ? { 'application/json': { schema: schemaReference(resource), example: example ?? exampleOf(resource) } }
      : pageOf !== undefined
        ? {
            'application/json': {
              schema: schemaReference(`${pageOf}Page`),
              example: { data: [exampleOf(pageOf)], next_cursor: null },
            },
          }
        : content;
  return {
    description,
    headers: {
      ...headerReferences([
        'X-Request-Id',
        ...(isLimited ? LIMITED : []),
        ...(isWrite ? (['Idempotent-Replayed'] as const) : []),
        ...(isCreated ? (['Location'] as const) : []),
      ]),
      ...headers,
    },
    ...(body === undefined ? {} : { content: body }),
  };
}

const IDEMPOTENCY_KEY: Parameter = {
  name: 'Idempotency-Key',
  in: 'header',
  description:
    'A value of your own, unique to each write: a repeat with it gets the same answer, and is not carried out again.',
  schema: {
    type: 'string',
    // A pair of double quotes around it does not count towards its length.
    pattern: '^(?:[!-~]{1,255}|"[!-~]{1,255}")$',
    not: { const: '""' },
    // Not the parameter's `example`: Swagger UI would send that with every write, and the second one would be 422.
    examples: ['1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed'],
  },
};

/** Headers by reference: each is described once, for all answers. */
export function headerReferences(names: readonly (keyof typeof HEADERS)[]): Record<string, Reference> {
  return Object.fromEntries(names.map((name) => [name, { $ref: `#/components/headers/${name}` }]));
}
