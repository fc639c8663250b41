import { AppError } from '../errors.ts';

export interface ServerEvent {
  type: string;
  data: string;
  /** The id of this event, or of the last before it that had one. */
  lastEventId: string;
}

/** Those of davit hold 16 KiB of a log at most. */
const EVENT_MAX_LENGTH = 256 * 1024;

/**
 * The events of a text/event-stream, as a browser reads it (WHATWG HTML, section 9.2.6). Ends with the bytes; an
 * incomplete event is dropped, and comments, such as heartbeats, are skipped. Throws AppError `conflict` for an event
 * that is too long.
 */
export async function* readEvents(
  bytes: AsyncIterable<Uint8Array>,
): AsyncGenerator<ServerEvent, void, undefined> {
  let type = '';
  let data: string[] = [];
  let length = 0;
  let lastEventId = '';
  for await (const line of readLines(bytes)) {
    if (line === '') {
      if (data.length > 0) yield { type: type || 'message', data: data.join('\n'), lastEventId };
      type = '';
      data = [];
      length = 0;
      continue;
    }
    const [, field = '', value = ''] = /^([^:]*):? ?(.*)$/s.exec(line) ?? [];
    switch (field) {
      case 'event':
        type = value;
        break;
      case 'data':
        data.push(value);
        length += value.length + 1;
        checkLength(length);
        break;
      case 'id':
        if (!value.includes('\0')) lastEventId = value;
        break;
      default: // a comment, `retry`, or a field that a later version may add
    }
  }
}

/** Lines that have ended, by CR LF, LF or CR. */
async function* readLines(bytes: AsyncIterable<Uint8Array>): AsyncGenerator<string, void, undefined> {
  const decoder = new TextDecoder('utf-8');
  let rest = '';
  for await (const piece of bytes) {
    rest += decoder.decode(piece, { stream: true });
    // A CR at the very end may be the first half of a CR LF.
    const lines = rest.split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop() ?? '';
    checkLength(rest.length);
    yield* lines;
  }
}

function checkLength(length: number): void {
  if (length <= EVENT_MAX_LENGTH) return;
  throw new AppError('conflict', 'what comes in place of the log is not from davit: is the URL right?');
}
