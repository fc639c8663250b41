import { once } from 'node:events';
import { type IncomingHttpHeaders, type IncomingMessage, request } from 'node:http';
import type { Test } from 'tap';

/** One event, as a browser's EventSource would hand it on. */
interface ServerSentEvent {
  type: string;
  data: string;
  /** The last one that was sent, in this event or before. */
  id: string;
}

interface EventStream {
  status: number;
  headers: IncomingHttpHeaders;
  /** The next event; undefined when the stream has ended. Rejects when it was cut off. */
  next(): Promise<ServerSentEvent | undefined>;
  /** All events that are still to come. */
  rest(): Promise<ServerSentEvent[]>;
  /** The comments so far. */
  comments: readonly string[];
  /** Leaves, as a closed browser tab does. */
  leave(): void;
}

/** Asks for a stream of events and reads it as fast as it comes. */
export async function openEvents(
  t: Test,
  port: number,
  path: string,
  key: string,
  headers: Record<string, string> = {},
): Promise<EventStream> {
  const asked = request({
    port,
    host: '127.0.0.1',
    path,
    agent: false,
    headers: { authorization: `Bearer ${key}`, accept: 'text/event-stream', ...headers },
  });
  asked.on('error', () => {}); // what concerns the answer is told by the answer
  t.teardown(() => asked.destroy());
  const answered = once(asked, 'response');
  asked.end();
  const [response] = (await answered) as [IncomingMessage];
  const comments: string[] = [];
  const events = parseEvents(response, comments);
  const next = async () => {
    const { value, done } = await events.next();
    return done === true ? undefined : value;
  };
  return {
    status: response.statusCode ?? 0,
    headers: response.headers,
    comments,
    next,
    async rest() {
      const all: ServerSentEvent[] = [];
      for (let one = await next(); one !== undefined; one = await next()) all.push(one);
      return all;
    },
    leave: () => void asked.destroy(),
  };
}

/** The text of a log, from its events. */
export function textOf(events: readonly ServerSentEvent[]): string {
  return events
    .filter(({ type }) => type === 'message')
    .map(({ data }) => data)
    .join('');
}

/** HTML, 9.2.5 and 9.2.6: lines may end with CR LF, LF or CR; an event ends with an empty line. */
export async function* parseEvents(
  stream: AsyncIterable<Uint8Array | string>,
  comments: string[] = [],
): AsyncGenerator<ServerSentEvent, undefined> {
  let id = '';
  let type = '';
  let data = '';
  for await (const line of linesOf(stream)) {
    if (line === '') {
      if (data !== '') yield { type: type === '' ? 'message' : type, data: data.replace(/\n$/, ''), id };
      type = '';
      data = '';
      continue;
    }
    const colon = line.indexOf(':');
    const field = colon === -1 ? line : line.slice(0, colon);
    const value = colon === -1 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (field === '') comments.push(value);
    else if (field === 'data') data += `${value}\n`;
    else if (field === 'event') type = value;
    else if (field === 'id' && !value.includes('\0')) id = value;
  }
  return undefined;
}

async function* linesOf(stream: AsyncIterable<Uint8Array | string>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  let text = '';
  for await (const bytes of stream) {
    text += decoder.decode(Buffer.from(bytes), { stream: true });
    for (;;) {
      const end = /\r\n|\n|\r(?!$)/.exec(text);
      if (end === null) break;
      yield text.slice(0, end.index);
      text = text.slice(end.index + end[0].length);
    }
  }
}
