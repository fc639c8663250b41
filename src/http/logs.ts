import { Readable } from 'node:stream';
import { setImmediate as nextTurn } from 'node:timers/promises';
import type { Plugin, Request, ResponseObject, ResponseToolkit } from '@hapi/hapi';
import type { DeploymentId } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { invalid } from '../errors.ts';
import { logChange } from '../store/changes.ts';
import type { DeploymentProgress } from '../store/deployments.ts';
import type { Reads } from '../store/store.ts';
import { callerOf, currentCaller } from './auth.ts';
import { notFound } from './errors.ts';
import { querySchema, wholeNumber } from './input-schemas.ts';
import { createLogEvents } from './log-events.ts';
import { type ResponseDescription, routeOptions } from './route-options.ts';
import { pathId } from './validation.ts';
import { closeWithResponse, type Watches } from './watches.ts';

interface LogQuery {
  offset?: number;
  tail?: number;
}

type LogRequest = Request<{ Params: { deployment_id: string }; Query: LogQuery }>;
type Toolkit = Pick<ResponseToolkit, 'response'>;

/** How much a response reads ahead of what its client has taken. */
const READ_AHEAD_BYTES = 16 * 1024;

/** The id of an event: an offset. No log has 10^15 bytes. */
const EVENT_ID = /^(0|[1-9]\d{0,14})$/;

/** Has as many digits at most, as the stream of an `offset` begins with that as its id. */
const OFFSET_MAX = 10 ** 15 - 1;

const LOGS_DESCRIPTION = `
As text: what the command has printed so far. The middle of a long log is left out, and a line says so.

With \`Accept: text/event-stream\`: the same, followed by new output until the deployment has ended. The \`id\` of an
event is the byte offset after it, so a client that reconnects with \`Last-Event-ID\` misses nothing and sees nothing
twice. The last event is of type \`end\`.
`.trim();

const LOGS_RESPONSE: ResponseDescription = {
  description: 'The log, or its events.',
  content: {
    'text/plain': { schema: { type: 'string' }, example: 'release.sh: deploying main\n' },
    'text/event-stream': {
      schema: { type: 'string' },
      example:
        'id: 27\ndata: release.sh: deploying main\ndata:\n\nid: 27\nevent: end\ndata: {"status":"succeeded"}\n\n',
    },
  },
  headers: {
    'Log-Next-Offset': {
      description: 'With text: the `offset` at which to go on.',
      schema: { type: 'integer', minimum: 0 },
    },
    'X-Accel-Buffering': {
      description: 'With events: tells nginx not to buffer them.',
      schema: { type: 'string', const: 'no' },
    },
  },
};

/** Serves the log of a deployment: as it is now, or followed to its end. */
export function logs(reads: Reads, watches: Watches, effects: Effects): Plugin<void> {
  const logEvents = createLogEvents(reads, effects);

  return {
    name: 'logs',
    register(server) {
      server.route<{ Params: { deployment_id: string }; Query: LogQuery }>({
        method: 'GET',
        path: '/v2/deployments/{deployment_id}/logs',
        options: routeOptions({
          scope: 'logs:read',
          input: {
            query: querySchema({
              offset: wholeNumber({ min: 0, max: OFFSET_MAX }).description(
                'Only the bytes from this one on.',
              ),
              tail: wholeNumber({ min: 0, max: Number.MAX_SAFE_INTEGER }).description(
                'Only that many bytes at the end; not together with `offset`.',
              ),
            }),
          },
          operationId: 'getLogs',
          summary: 'Read or follow a log',
          description: LOGS_DESCRIPTION,
          responses: { 200: LOGS_RESPONSE },
          errors: {
            rate_limited: 'Too many requests, or too many requests of this key follow or wait already.',
          },
          headers: {
            'Last-Event-ID': {
              description: 'With `Accept: text/event-stream`: the id of the last event that was received.',
              schema: { type: 'string', pattern: EVENT_ID.source },
            },
          },
        }),
        handler(request, h) {
          const follows = wantsEvents(request);
          const lastEventId = follows ? lastEventIdOf(request) : undefined;
          refuseOffsetWithTail(request.query);
          const id = pathId('dpl', request.params.deployment_id);
          const deployment = reads.deployments.progressVisibleTo(callerOf(request), id);
          if (deployment === undefined) throw notFound();
          const from = lastEventId ?? firstByte(request.query, deployment);
          return follows ? respondWithEvents(request, h, id, from) : respondWithText(h, deployment, from);
        },
      });
    },
  };

  function respondWithText(h: Toolkit, { id, log_bytes }: DeploymentProgress, from: number): ResponseObject {
    return h
      .response(Readable.from(inTurns(reads.logs.text(id, from, log_bytes)), streamOptions))
      .type('text/plain')
      .header('Log-Next-Offset', String(Math.max(from, log_bytes)));
  }

  function respondWithEvents(
    request: LogRequest,
    h: Toolkit,
    id: DeploymentId,
    from: number,
  ): ResponseObject {
    const watch = watches.open([id, logChange(id)], callerOf(request).keyId);
    // Destroying the stream does not end a generator that is waiting; closing the watch does.
    closeWithResponse(watch, request);
    // Only the key itself is checked again, as the projects that it sees never change.
    const mayFollow = () => currentCaller(request, reads, effects.now()) !== undefined;
    return h
      .response(Readable.from(logEvents({ id, from, watch, mayFollow }), streamOptions))
      .type('text/event-stream')
      .header('X-Accel-Buffering', 'no'); // nginx would keep events back until it has a few pages of them
  }
}

/**
 * A turn of the event loop for each piece. A client that takes a log as fast as it comes never makes the stream wait:
 * without the turns, 490 connections to a log of 5 MiB stopped all else for 6 s.
 */
async function* inTurns(pieces: Iterable<Buffer>): AsyncGenerator<Buffer, void, undefined> {
  for (const piece of pieces) {
    yield piece;
    await nextTurn();
  }
}

const streamOptions = { objectMode: false, highWaterMark: READ_AHEAD_BYTES };

/** Of an Accept; nobody needs more. All of 16 KiB with nothing but commas took 7 ms. */
const ACCEPT_READ_MAX_LENGTH = 1_024;

/**
 * Whether Accept names the event stream and prefers it to the text (RFC 9110, 12.5.1). A client that names both alike, as
 * generated clients do, may read the response to its end before it goes on, so it gets the text. One that accepts
 * anything else alike, as many readers of events do, gets the events.
 */
function wantsEvents({ headers }: LogRequest): boolean {
  const weights = weightsOf(headers.accept ?? '');
  const events = weights.get('text/event-stream') ?? 0;
  const text = weights.get('text/plain');
  if (text !== undefined) return events > text;
  return events > 0 && events >= (weights.get('text/*') ?? weights.get('*/*') ?? 0);
}

function weightsOf(accept: string): Map<string, number> {
  const ranges = accept.slice(0, ACCEPT_READ_MAX_LENGTH).split(',');
  // The last one is cut, perhaps within its weight.
  if (accept.length > ACCEPT_READ_MAX_LENGTH) ranges.pop();
  return new Map(
    ranges.map((range) => {
      const [type = '', ...parameters] = range.split(';').map((word) => word.trim().toLowerCase());
      const weight = parameters.find((parameter) => parameter.startsWith('q='));
      return [type, weight === undefined ? 1 : Number(weight.slice(2))];
    }),
  );
}

function lastEventIdOf({ headers }: LogRequest): number | undefined {
  const value: unknown = headers['last-event-id'];
  if (value === undefined) return undefined;
  if (typeof value === 'string' && EVENT_ID.test(value)) return Number(value);
  throw invalid('header', 'Last-Event-ID', 'must be the id of an event of this log');
}

function refuseOffsetWithTail({ offset, tail }: LogQuery): void {
  if (offset !== undefined && tail !== undefined) {
    throw invalid('query', 'tail', 'must not be sent together with offset');
  }
}

function firstByte({ offset, tail }: LogQuery, { log_bytes }: DeploymentProgress): number {
  if (tail !== undefined) return Math.max(0, log_bytes - tail);
  return offset ?? 0;
}
