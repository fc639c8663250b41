import Joi from 'joi';
import { type IdPrefix, parseId, parseRef, parseTimestamp, TIMESTAMP_FORM } from '../domain.ts';
import { idJsonSchema, REF_JSON_SCHEMA } from './json-schema.ts';

/** A JSON object with these fields and no others. */
export function bodySchema(fields: Joi.SchemaMap): Joi.ObjectSchema {
  return Joi.object(fields).required();
}

/** Query parameters: each is a string or, if it is repeated, a list of strings. */
export function querySchema(fields: Joi.SchemaMap): Joi.ObjectSchema {
  return Joi.object(fields);
}

/** For probes and pages: monitors, caches and links add parameters of their own. */
export const anyQuery = Joi.object().unknown();

/** See `parseRef`. */
export const refSchema = Joi.string()
  .custom((value: string, helpers) => {
    const result = parseRef(value);
    return result.ok ? result.ref : helpers.error('any.invalid', { reason: result.reason });
  })
  .meta({ jsonSchema: REF_JSON_SCHEMA });

/** Any text. Its length is counted in code points, as JSON Schema does: an emoji is one character. */
export function textSchema(maxCharacters: number): Joi.StringSchema {
  return Joi.string()
    .custom((value: string, helpers) =>
      // Code points are counted only where the length in UTF-16 does not decide it.
      value.length <= maxCharacters ||
      (value.length <= 2 * maxCharacters && [...value].length <= maxCharacters)
        ? value
        : helpers.error('string.max', { limit: maxCharacters }),
    )
    .meta({ jsonSchema: { type: 'string', maxLength: maxCharacters } });
}

/** An id in a body or a query. For one in a path see `pathId`. */
export function idSchema(prefix: IdPrefix): Joi.StringSchema {
  return Joi.string()
    .custom(
      (value: unknown, helpers) =>
        parseId(prefix, value) ??
        helpers.error('any.invalid', { reason: `must be an id that begins with ${prefix}_` }),
    )
    .meta({ jsonSchema: idJsonSchema(prefix) });
}

const PAGE_DEFAULT_LIMIT = 50;
export const PAGE_MAX_LIMIT = 200;

/** `?limit=` and `?cursor=`. The cursor is opaque here; src/http/pages.ts checks it. */
export const pageParameters = {
  limit: wholeNumber({ min: 1, max: PAGE_MAX_LIMIT, clamp: true })
    .default(PAGE_DEFAULT_LIMIT)
    .description(`How many items at most; a value above ${PAGE_MAX_LIMIT} is taken as ${PAGE_MAX_LIMIT}.`),
  cursor: Joi.string().max(1024).description('`next_cursor` of the previous page.'),
};

/** A number in a query: digits, no sign, no leading zero. With `clamp`, a larger one becomes `max`. */
export function wholeNumber({
  min,
  max,
  clamp = false,
}: {
  min: number;
  max: number;
  clamp?: boolean;
}): Joi.StringSchema {
  return Joi.string()
    .custom((value: string, helpers) => {
      const number = /^(0|[1-9]\d*)$/.test(value) ? Number(value) : Number.NaN;
      if (number >= min && (number <= max || clamp)) return Math.min(number, max);
      return helpers.error('any.invalid', { reason: `must be a whole number from ${min} to ${max}` });
    })
    .meta({ jsonSchema: { type: 'integer', minimum: min, ...(clamp ? {} : { maximum: max }) } });
}

/*
 * A time in RFC 3339, with seconds and an offset; becomes milliseconds since 1970. What was created at .939 is earlier
 * than .9395, so the bounds of a selection are rounded each in its own way.
 */

/** For the last moment that is selected, and for one after which the selection begins. */
export const timestampRoundedDown = momentSchema(Math.floor);

/** For the first moment that is selected, and for one before which the selection ends. */
export const timestampRoundedUp = momentSchema(Math.ceil);

/** `?created_after=` and `?created_before=`, both exclusive. */
export const creationParameters = {
  created_after: timestampRoundedDown.description('Only those created later than this.'),
  created_before: timestampRoundedUp.description('Only those created earlier than this.'),
};

/** `round`: how to round to a whole millisecond. */
function momentSchema(round: (partMs: number) => number): Joi.StringSchema {
  return Joi.string()
    .custom(
      (value: string, helpers) =>
        parseTimestamp(value, round) ??
        helpers.error('any.invalid', { reason: 'must be a time such as 2026-01-31T12:00:00.000Z' }),
    )
    .meta({
      jsonSchema: {
        type: 'string',
        format: 'date-time',
        pattern: TIMESTAMP_FORM.source,
        examples: ['2026-01-31T12:00:00Z'],
      },
    });
}

/** A query parameter that may be repeated, each time with one of `values`; becomes a list without duplicates. */
export function oneOrMoreOf(values: readonly string[]): Joi.AnySchema {
  return Joi.any()
    .custom((value: unknown, helpers) => {
      const given = [...new Set(Array.isArray(value) ? value : [value])];
      if (given.every((one) => values.includes(one))) return given;
      return helpers.error('any.invalid', { reason: mustBeOneOf(values) });
    })
    .meta({ jsonSchema: { type: 'array', items: { type: 'string', enum: values } } });
}

/** The reason for a value that is none of these. */
export function mustBeOneOf(values: unknown): string {
  return `must be one of ${Array.isArray(values) ? values.join(', ') : ''}`;
}
