import type { RouteOptions } from '@hapi/hapi';
import type { Scope } from '../domain.ts';
import type { JsonSchema } from './json-schema.ts';
import type { RouteError } from './openapi-text.ts';
import type { Header, MediaType } from './openapi-types.ts';
import type { ResourceName } from './resources.ts';
import type { RouteInput } from './validation.ts';

declare module '@hapi/hapi' {
  interface PluginSpecificConfiguration {
    openapi?: RouteDescription;
  }
}

/**
 * What a route's declaration adds to the API description. Its path and joi schemas are known to hapi, and what all
 * routes of a kind have in common (errors, paging, idempotency) is added here.
 */
export interface RouteDescription {
  /** What a key needs for it; null: it asks for no key. */
  scope: Scope | null;
  /** The function's name in generated clients. Must not change once it is released. */
  operationId: string;
  summary: string;
  description?: string;
  /** Successful answers, by status. */
  responses: Record<number, ResponseDescription>;
  /** When errors are sent that only some routes have, or that mean something special here. */
  errors?: Partial<Record<RouteError, string>>;
  /** Headers that the handler reads itself. */
  headers?: Record<string, { description: string; schema: JsonSchema }>;
}

export interface ResponseDescription {
  description: string;
  /** The body is one `resource`, a page of `pageOf`, or `content`; without any of the three there is no body. */
  resource?: ResourceName;
  pageOf?: ResourceName;
  content?: Record<string, MediaType>;
  /** In place of the resource's own example. */
  example?: unknown;
  headers?: Record<string, Header>;
}

/** A route's options for hapi: who may call it, what it accepts, and its description. */
export function routeOptions({
  input = {},
  ...openapi
}: RouteDescription & { input?: RouteInput }): Pick<RouteOptions, 'auth' | 'plugins'> {
  const { scope } = openapi;
  return { auth: scope === null ? false : { scope }, plugins: { openapi, input } };
}
