import type { Request } from '@hapi/hapi';
import Joi from 'joi';
import { type IdOfPrefix, type IdPrefix, parseId } from '../domain.ts';
import { AppError, type ErrorDetail, invalid } from '../errors.ts';
import { withoutSecrets } from '../secrets.ts';
import { notFound } from './errors.ts';
import { mustBeOneOf } from './input-schemas.ts';

declare module '@hapi/hapi' {
  interface PluginSpecificConfiguration {
    input?: RouteInput;
  }
}

/** What a route accepts: no query parameters and no body, unless there are schemas for them. */
export interface RouteInput {
  query?: Joi.Schema;
  payload?: Joi.Schema;
}

const noQuery = Joi.object({});

/** For a write whose path says everything: no body, or an empty object. */
const noBody = Joi.object({}).empty(null).default({});

/** No coercion, and all errors of the query, or of the body, reported together. */
const STRICT: Joi.ValidationOptions = { abortEarly: false, convert: false };

/**
 * Validates the query and the body of a request by its route's schemas, and sets both to the result. hapi would do so in
 * steps of its own, which take 4 µs more for each of the two, of 75 that creating a deployment takes in this thread.
 */
export function validateInput(request: Request): void {
  const { query, payload = noBody } = request.route.settings.plugins?.input ?? {};
  if (query !== undefined || Object.keys(request.query).length > 0) {
    Object.assign(request, { query: validated(request.query, query ?? noQuery, 'query') });
  }
  if (request.route.method !== 'get') {
    Object.assign(request, { payload: validated(request.payload, payload, 'body') });
  }
}

function validated(input: unknown, schema: Joi.Schema, place: 'query' | 'body'): unknown {
  const { value, error } = schema.validate(input, STRICT);
  if (error === undefined) return value;
  // joi also reports exceptions of custom rules, which are bugs and not invalid requests.
  const bug = error.details.find(({ type }) => type === 'any.custom');
  if (bug !== undefined) throw new Error('a validation rule threw', { cause: bug.context?.['error'] });
  // joi may say two things of one value: that it is none of those allowed, and no text.
  const ofFields = Map.groupBy(error.details, ({ path }) => path.join('.'));
  const details = [...ofFields.values()]
    .slice(0, MAX_DETAILS)
    .flatMap(([first]) => (first === undefined ? [] : [toDetail(first, place, input)]));
  const message = details.map(({ field, reason }) => `${field}: ${reason}`).join('; ');
  throw new AppError('invalid_request', message, { details });
}

/** One request can have more than a hundred errors; nobody reads more than a few. */
const MAX_DETAILS = 10;

function toDetail(item: Joi.ValidationErrorItem, place: ErrorDetail['in'], input: unknown): ErrorDetail {
  if (item.path.length > 0) return { in: place, field: fieldName(item.path), reason: reasonOf(item, place) };
  return { in: place, field: place, reason: input === null ? 'required' : reasonOf(item, place) };
}

const FIELD_NAME_MAX_LENGTH = 64;

/**
 * Unknown names are the client's text: without secrets, as in `?davit_…` for lack of a header; cut, and without control
 * characters, for the sake of terminals and logs. An empty one is shown as `""`.
 */
function fieldName(path: (string | number)[]): string {
  const name = withoutSecrets(path.map((part) => (part === '' ? '""' : part)).join('.')).replaceAll(
    /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu,
    '\u{fffd}',
  );
  const characters = [...name];
  return characters.length <= FIELD_NAME_MAX_LENGTH
    ? name
    : `${characters.slice(0, FIELD_NAME_MAX_LENGTH).join('')}…`;
}

/** davit's own message for each rule, as some of joi's messages echo the value. */
function reasonOf({ type, context = {} }: Joi.ValidationErrorItem, place: ErrorDetail['in']): string {
  switch (type) {
    case 'any.required':
      return 'required';
    case 'object.unknown':
      return 'is not allowed';
    case 'any.invalid': {
      const reason = typeof context['reason'] === 'string' ? context['reason'] : 'is invalid';
      const holdsBlank = typeof context.value === 'string' && context.value.includes(' ');
      return place === 'query' && holdsBlank ? `${reason} (in a query, write %2B for +)` : reason;
    }
    case 'any.only':
      return mustBeOneOf(context['valids']);
    case 'string.base':
      return place === 'query' && Array.isArray(context.value) ? 'must not be repeated' : 'must be a string';
    case 'string.empty':
      return 'must not be empty';
    case 'string.max':
      return `must be at most ${context['limit']} characters`;
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
      return `must have at least ${context['limit']} ${context['limit'] === 1 ? 'item' : 'items'}`;
    case 'array.unique':
      return 'must not be repeated';
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

/**
 * Parses the id in a path. A malformed one is 404, as an unknown one is. Call this in the handler, after validation, so
 * that both get their 404 at the same stage.
 */
export function pathId<P extends IdPrefix>(prefix: P, value: string): IdOfPrefix[P] {
  const id = parseId(prefix, value);
  if (id === undefined) throw notFound();
  return id;
}

/**
 * The Idempotency-Key header, or undefined: 1 to 255 visible ASCII characters, without the pair of double quotes that
 * may be around them. Node joins repeated headers with a comma and a space, and the space is refused.
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

/** Validates the Idempotency-Key of every write before its handler looks anything up. */
export function checkIdempotencyKey(request: Request): void {
  if (request.route.method !== 'get') idempotencyKey(request);
}
