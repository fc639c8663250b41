import type { IdPrefix } from '../domain.ts';

/** JSON Schema 2020-12, as OpenAPI 3.1 uses it. */
export interface JsonSchema {
  type?: string | string[];
  description?: string;
  format?: string;
  pattern?: string;
  enum?: readonly unknown[];
  const?: unknown;
  minimum?: number;
  maximum?: number;
  minLength?: number;
  maxLength?: number;
  minItems?: number;
  uniqueItems?: boolean;
  default?: unknown;
  examples?: unknown[];
  properties?: Record<string, JsonSchema>;
  required?: string[];
  additionalProperties?: boolean | JsonSchema;
  items?: JsonSchema;
  $ref?: string;
  [keyword: string]: unknown;
}

/** What `parseRef` accepts; a test compares the two. With `not`, as Go and Rust know no lookahead in a pattern. */
export const REF_JSON_SCHEMA: JsonSchema = {
  type: 'string',
  minLength: 1,
  maxLength: 255,
  pattern: '^[A-Za-z0-9_][A-Za-z0-9._/+@=,#-]*$',
  not: { pattern: '^HEAD$|\\.\\.|//|/\\.|\\.lock(?:/|$)|[/.]$' },
  examples: ['main'],
};

/** What `parseId` accepts. */
export function idJsonSchema(prefix: IdPrefix): JsonSchema {
  return {
    type: 'string',
    maxLength: 64,
    pattern: `^${prefix}_[0-9A-Za-z]+$`,
    examples: [EXAMPLE_IDS[prefix]],
  };
}

export const EXAMPLE_IDS: Record<IdPrefix, string> = {
  prj: 'prj_Vb4mYpQx8Z2kLrT7vNbC1dWe',
  dpl: 'dpl_Vb9sFhJ3uKqA6wRtYx0ZbVnM',
  whk: 'whk_Vb2eGdTgB5yHnUjM8iKoLpQa',
  evt: 'evt_Vb7zXcVbN1mAsDfGhJkLqWeR',
  key: 'key_Vb5tYuIoP3aSdFgHjKlZxCvB',
  dlv: 'dlv_Vb8nMqWeRtYuIoPaSdFgHj4K',
  req: 'req_Vb1lKjHgFdSaPoIuYtReWqMn',
};
