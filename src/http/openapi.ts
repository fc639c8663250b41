import type { Plugin, Server } from '@hapi/hapi';
import { version } from '../assets.ts';
import type { EventType } from '../domain.ts';
import { EXAMPLE_IDS, type JsonSchema } from './json-schema.ts';
import { headerReferences, operationOf } from './openapi-route.ts';
import {
  API_DESCRIPTION,
  EVENT_HEADERS,
  EVENT_MEANINGS,
  HEADERS,
  ROUTE_ERRORS,
  TAGS,
} from './openapi-text.ts';
import {
  METHODS,
  type OpenApiDocument,
  type Operation,
  type PathItem,
  type Response,
} from './openapi-types.ts';
import { exampleOf, pageSchema, RESOURCES, type ResourceName, schemaReference } from './resources.ts';
import { routeOptions } from './route-options.ts';

/** `GET /v2/openapi.json`, generated at the first request. */
export function openapi(): Plugin<void> {
  return {
    name: 'description',
    register(server) {
      let text: Buffer | undefined; // not a string: those who do not take it share its bytes, see send-buffers.ts
      server.route({
        method: 'GET',
        path: '/v2/openapi.json',
        options: routeOptions({
          scope: null,
          operationId: 'getOpenapi',
          summary: 'This description',
          description: 'OpenAPI 3.1. `/docs` shows the same for people.',
          responses: {
            200: {
              description: 'The description.',
              content: { 'application/json': { schema: OPENAPI_SCHEMA } },
            },
          },
        }),
        handler(_request, h) {
          text ??= Buffer.from(JSON.stringify(describeApi(server)));
          return h.response(text).type('application/json');
        },
      });
    },
  };
}

const OPENAPI_SCHEMA: JsonSchema = {
  type: 'object',
  properties: { openapi: { type: 'string', pattern: '^3\\.1\\.' } },
  required: ['openapi'],
  additionalProperties: true,
};

/** The OpenAPI 3.1 description of every route of `server` that comes with one. */
export function describeApi(server: Server): OpenApiDocument {
  const routes = describedRoutes(server);
  const operations = routes.map(({ operation }) => operation);
  const paths: Record<string, PathItem> = {};
  for (const { path, method, operation } of routes) {
    paths[path] = { ...paths[path], [method]: operation };
  }
  return {
    openapi: '3.1.1',
    info: {
      title: 'davit',
      version,
      summary: 'Deploys refs of projects, and tells webhooks how it went.',
      description: API_DESCRIPTION,
      license: { name: 'MIT', identifier: 'MIT' },
    },
    servers: [{ url: '/', description: 'where this description comes from' }],
    tags: TAGS,
    paths,
    webhooks: Object.fromEntries(
      Object.entries(EVENT_MEANINGS).map(([type, text]) => [type, event(type, text)]),
    ),
    components: {
      schemas: usedSchemas(operations),
      responses: errorResponses(),
      headers: HEADERS,
      securitySchemes: {
        key: {
          type: 'http',
          scheme: 'bearer',
          description: 'An API key: `Authorization: Bearer <API_KEY>`.',
        },
      },
    },
  };
}

interface DescribedRoute {
  path: string;
  method: (typeof METHODS)[number];
  tag: string;
  operation: Operation;
}

function describedRoutes(server: Server): DescribedRoute[] {
  return server
    .table()
    .flatMap((route) => {
      const description = route.settings.plugins?.openapi;
      const method = METHODS.find((method) => method === route.method);
      if (description === undefined || method === undefined) return [];
      const tag = route.realm.plugin ?? '';
      return [{ path: route.path, method, tag, operation: operationOf(route, description, tag) }];
    })
    .sort(inReadingOrder);
}

/** Tag by tag; in each, first what creates a resource, then the lists, then what can be done with one resource. */
function inReadingOrder(a: DescribedRoute, b: DescribedRoute): number {
  const position = ({ tag }: DescribedRoute): number => TAGS.findIndex(({ name }) => name === tag);
  const rank = ({ path, method, tag }: DescribedRoute): number =>
    !path.endsWith(`/${tag}`) ? 2 : method === 'post' ? 0 : 1;
  return (
    position(a) - position(b) ||
    rank(a) - rank(b) ||
    compare(a.path, b.path) ||
    METHODS.indexOf(a.method) - METHODS.indexOf(b.method)
  );
}

function compare(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

/** All resources, and the pages that an operation refers to. */
function usedSchemas(operations: Operation[]): Record<string, JsonSchema> {
  const names = Object.keys(RESOURCES) as ResourceName[];
  const pages = Object.fromEntries(names.map((name) => [`${name}Page`, pageSchema(name)]));
  const text = JSON.stringify(operations);
  const used = Object.entries(pages).filter(([name]) => text.includes(`/schemas/${name}"`));
  return { ...RESOURCES, ...Object.fromEntries(used) };
}

/** The errors of all operations, by code. */
function errorResponses(): Record<string, Response> {
  return Object.fromEntries(
    Object.entries(ROUTE_ERRORS).map(([code, { when, message, details, headers = [] }]) => [
      code,
      {
        description: when,
        headers: headerReferences(['X-Request-Id', ...headers]),
        content: {
          'application/json': {
            schema: schemaReference('Error'),
            example: {
              error: {
                code,
                message,
                request_id: EXAMPLE_IDS.req,
                ...(details === undefined ? {} : { details }),
              },
            },
          },
        },
      },
    ]),
  );
}

const SIGNED_EXAMPLE: EventType = 'deployment.succeeded';

/** An event, described as the request that its receiver gets. */
function event(type: string, summary: string): PathItem {
  const name = type.replaceAll(/(^|\.)([a-z])/g, (_match, _dot, letter: string) => letter.toUpperCase());
  const isPing = type === 'ping';
  const resource = isPing ? 'Ping' : 'Event';
  return {
    post: {
      operationId: `on${name}`,
      summary,
      tags: ['events'],
      security: [],
      parameters: Object.entries(EVENT_HEADERS).map(([name, { description, example }]) => ({
        name,
        in: 'header',
        required: true,
        description,
        schema: { type: 'string' },
        ...(type === SIGNED_EXAMPLE ? { example } : {}),
      })),
      requestBody: {
        required: true,
        content: {
          'application/json': {
            schema: schemaReference(resource),
            example: { ...exampleOf(resource), type },
          },
        },
      },
      responses: {
        '2XX': {
          description:
            'Delivered, if this comes within 10 seconds of the start of the attempt, or the time that the service is set to.',
        },
        ...(isPing ? {} : { '410': { description: 'The receiver is gone: davit disables the webhook.' } }),
        default: {
          description: isPing
            ? 'Not delivered, also if it is a redirect. The answer to the ping request says so, and it is not sent again.'
            : 'Not delivered, also if it is a redirect. It is sent again with growing delays, for 24 hours, or the time that the service is set to.',
        },
      },
    },
  };
}
