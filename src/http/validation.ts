import type { Lifecycle, Request, RouteOptionsValidate } from '@hapi/hapi';
import Joi from 'joi';
import { type IdPrefix, parseId, parseRef, parseTimestamp, TIMESTAMP_FORM } from '../domain.ts';
import { AppError, type ErrorDetail, invalid } from '../errors.ts';
import { notFound } from './errors.ts';
import { idJsonSchema, REF_JSON_SCHEMA } from './resources.ts';

/** For a write that says everything with its path: no body, or an empty object. */
const noBody = Joi.object({}).empty(null).default({});

/** A JSON object with these fields and no others. */
export function bodySchema(fields: Joi.SchemaMap): Joi.ObjectSchema {
  return Joi.object(fields).required();
}

/** Query parameters, which always are text or, repeated, a list of texts. */
export function querySchema(fields: Joi.SchemaMap): Joi.ObjectSchema {
  return Joi.object(fields);
}

/**
 * What holds for every route that says nothing else: no query parameters, no body, nothing coerced,
 * everything that is wrong reported together.
 */
export const routeValidation: RouteOptionsValidate = {
  options: { abortEarly: false, convert: false },
  failAction: refuseInvalid,
  query: querySchema({}),
  payload: noBody,
};

/** See `parseRef`. */
export const refSchema = Joi.string()
  .custom((value: unknown, helpers) => {
    const result = parseRef(value);
    return result.ok ? result.ref : helpers.error('any.invalid', { reason: result.reason });
  })
  .meta({ jsonSchema: REF_JSON_SCHEMA });

/** Text for people, without bounds on what it says. Counted as the description counts: an emoji is one character. */
export function textSchema(maxCharacters: number): Joi.StringSchema {
  return Joi.string()
    .custom((value: string, helpers) =>
      // What is short in UTF-16 needs no counting, and what is long is refused before it is counted.
      value.length <= maxCharacters ||
      (value.length <= 2 * maxCharacters && [...value].length <= maxCharacters)
        ? value
        : helpers.error('string.max', { limit: maxCharacters }),
    )
    .meta({ jsonSchema: { type: 'string', maxLength: maxCharacters } });
}

/** An id in a body or a query. One in a path is `pathId`'s. */
export function idSchema(prefix: IdPrefix): Joi.StringSchema {
  return Joi.string()
    .custom(
      (value: unknown, helpers) =>
        parseId(prefix, value) ??
        helpers.error('any.invalid', { reason: `must be an id that begins with ${prefix}_` }),
    )
    .meta({ jsonSchema: idJsonSchema(prefix) });
}

/**
 * The id in a path. One that cannot be an id is answered as one that never was, so this is for the handler,
 * after validation: 404 must not come earlier for the one than for the other.
 */
export function pathId<P extends IdPrefix>(
  prefix: P,
  value: string,
): NonNullable<ReturnType<typeof parseId<P>>> {
  const id = parseId(prefix, value);
  if (id === undefined) throw notFound();
  return id;
}

const PAGE_DEFAULT_LIMIT = 50;
export const PAGE_MAX_LIMIT = 200;

/** `?limit=` and `?cursor=`. The cursor is opaque here; src/http/pages.ts judges it. */
export const pageParameters = {
  limit: wholeNumber({ min: 1, max: PAGE_MAX_LIMIT, clamp: true })
    .default(PAGE_DEFAULT_LIMIT)
    .description(`How many items; more than ${PAGE_MAX_LIMIT} are taken as ${PAGE_MAX_LIMIT}.`),
  cursor: Joi.string().max(1024).description('`next_cursor` of the page before.'),
};

/** A number as it stands in a query: digits, no sign, no leading zero. With `clamp`, a larger one becomes `max`. */
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

/** A moment, RFC 3339 with seconds and an offset; becomes milliseconds since 1970, parts of them dropped. */
export const timestampSchema = momentSchema(Math.floor);

/** `?created_after=` and `?created_before=`: both leave out the moment itself. */
export const creationParameters = {
  created_after: timestampSchema.description('Only those that were made later.'),
  // What was made at .939 is earlier than .9395, which must not become .939.
  created_before: momentSchema(Math.ceil).description('Only those that were made earlier.'),
};

/** `round`: what becomes of parts of a millisecond. */
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

/** A query parameter that may be repeated, each time with one of `values`; becomes a list without doubles. */
export function oneOrMoreOf(values: readonly string[]): Joi.AnySchema {
  return Joi.any()
    .custom((value: unknown, helpers) => {
      const given = [...new Set(Array.isArray(value) ? value : [value])];
      if (given.every((one) => values.includes(one))) return given;
      return helpers.error('any.invalid', { reason: mustBeOneOf(values) });
    })
    .meta({ jsonSchema: { type: 'array', items: { type: 'string', enum: values } } });
}

/**
 * The Idempotency-Key header: 1 to 255 visible ASCII characters, one pair of double quotes around them not
 * counted. Undefined when there is none. Two such headers reach us joined by a space, which is refused.
 */
export function idempotencyKey({ headers }: Pick<Request, 'headers'>): string | undefined {
  const value: unknown = headers['idempotency-key'];
  if (value === undefined) return undefined;
  const key = typeof value === 'string' && /^".*"$/.test(value) ? value.slice(1, -1) : value;
  if (typeof key !== 'string' || !/^[\x21-\x7e]{1,255}$/.test(key)) {
    throw invalid('header', 'Idempotency-Key', 'must be 1 to 255 visible ASCII characters, and sent once');
  }
  return key;
}

/** For every write where the rest is validated too: before a handler looks anything up. */
export function checkIdempotencyKey(request: Request): void {
  if (request.route.method !== 'get') idempotencyKey(request);
}

/** hapi calls this with joi's error, or with whatever a schema threw. */
function refuseInvalid(request: Request, _h: unknown, error: Error | undefined): Lifecycle.ReturnValue {
  if (!isValidationFailure(error)) throw error ?? new Error('a validation failed without a reason');
  // joi also collects what a rule of ours threw; that is a bug, not a refusal.
  const bug = error.details.find(({ type }) => type === 'any.custom');
  if (bug !== undefined) throw new Error('a validation rule threw', { cause: bug.context?.['error'] });
  const place = PLACES[error.output.payload.validation.source];
  const details = error.details.slice(0, MAX_DETAILS).map((item) => toDetail(item, place, request));
  const message = details.map(({ field, reason }) => `${field}: ${reason}`).join('; ');
  throw new AppError('invalid_request', message, { details });
}

/** One request can be wrong in thousands of ways; nobody reads more than some. */
const MAX_DETAILS = 10;

const PLACES = { payload: 'body', query: 'query', params: 'path', headers: 'header' } as const;

interface ValidationFailure extends Joi.ValidationError {
  output: { payload: { validation: { source: keyof typeof PLACES } } };
}

function isValidationFailure(error: Error | undefined): error is ValidationFailure {
  return Joi.isError(error);
}

function toDetail(item: Joi.ValidationErrorItem, place: ErrorDetail['in'], request: Request): ErrorDetail {
  if (item.path.length > 0) return { in: place, field: fieldName(item.path), reason: reasonOf(item, place) };
  return { in: place, field: place, reason: request.payload === null ? 'required' : reasonOf(item, place) };
}

const FIELD_NAME_MAX_LENGTH = 64;

/** The name of an unknown field is the sender's text: cut, and without what could act on a terminal or in a log. */
function fieldName(path: (string | number)[]): string {
  const name = path.join('.').replaceAll(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, '\u{fffd}');
  const characters = [...name];
  return characters.length <= FIELD_NAME_MAX_LENGTH
    ? name
    : `${characters.slice(0, FIELD_NAME_MAX_LENGTH).join('')}…`;
}

/** Our own words, rule by rule: some of joi's repeat the value. */
function reasonOf({ type, context = {} }: Joi.ValidationErrorItem, place: ErrorDetail['in']): string {
  switch (type) {
    case 'any.required':
      return 'required';
    case 'object.unknown':
      return 'is not allowed';
    case 'any.invalid':
      return typeof context['reason'] === 'string' ? context['reason'] : 'is invalid';
    case 'any.only':
      return mustBeOneOf(context['valids']);
    case 'string.base':
      return place === 'query' && Array.isArray(context.value) ? 'must not be repeated' : 'must be a string';
    case 'string.empty':
      return 'must not be empty';
    case 'string.min':
      return `must be at least ${context['limit']} characters`;
    case 'string.max':
      return `must be at most ${context['limit']} characters`;
    case 'boolean.base':
      return 'must be true or false';
    case 'number.base':
    case 'number.integer':
    case 'number.unsafe':
    case 'number.infinity':
      return 'must be a whole number';
    case 'number.min':
      return `must be at least ${context['limit']}`;
    case 'number.max':
      return `must be at most ${context['limit']}`;
    case 'array.base':
      return 'must be a list';
    case 'array.min':
      return `must have at least ${context['limit']} items`;
    case 'array.max':
      return `must have at most ${context['limit']} items`;
    case 'array.unique':
      return 'must not be there twice';
    case 'object.base':
      return 'must be an object';
    case 'object.min':
      return 'must have at least one field';
    case 'object.max':
      return `must have at most ${context['limit']} fields`;
    default:
      return 'is invalid';
  }
}

function mustBeOneOf(values: unknown): string {
  return `must be one of ${Array.isArray(values) ? values.join(', ') : ''}`;
}
