import { setImmediate as nextTurn } from 'node:timers/promises';
import { printable } from '../printable.ts';
import type { Terminal } from './terminal.ts';

/** Where the log of a deployment is shown. */
export interface LogOutput {
  /** False: nobody reads any more. */
  write(bytes: Uint8Array): Promise<boolean>;
  /** Gives the terminal its own colours back, if the log has set others. */
  end(): Promise<void>;
}

/** For a file or a pipe, the very bytes. For a terminal, text in which only colours can take effect. */
export function createLogOutput(terminal: Pick<Terminal, 'columns' | 'colours' | 'write'>): LogOutput {
  if (terminal.columns === null) {
    return { write: terminal.write, end: async () => undefined };
  }
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  const text = harmlessText(terminal.colours);
  let last = '\n';

  return {
    write: (bytes) => show(text.push(decoder.decode(bytes, { stream: true }))),
    async end() {
      await show(text.push(decoder.decode()) + text.end());
      const restored = `${text.isColoured() ? RESET_COLOURS : ''}${last === '\n' ? '' : '\n'}`;
      if (restored !== '') await terminal.write(Buffer.from(restored));
    },
  };

  async function show(shown: string): Promise<boolean> {
    last = shown.at(-1) ?? last;
    if (shown === '') return true;
    await nextTurn(); // as writing to a terminal blocks, no signal would be handled before the end of a long log
    return await terminal.write(Buffer.from(shown));
  }
}

const ESCAPE = '\u001b';
/**
 * A sequence that sets colours (ECMA-48, 8.3.117, SGR), or a single control character, one that changes the direction of
 * writing included.
 */
const CONTROL = new RegExp(`${ESCAPE}\\[[\\d;:]{0,32}m|[\\p{Cc}\\u2028-\\u202e\\u2066-\\u2069]`, 'gu');
const INCOMPLETE = new RegExp(`${ESCAPE}(?:\\[[\\d;:]{0,32})?$`, 'u');
const RESET_COLOURS = `${ESCAPE}[0m`;

interface HarmlessText {
  push(text: string): string;
  /** What was held back as the possible beginning of a sequence. */
  end(): string;
  isColoured(): boolean;
}

/** Makes control characters visible in a text that comes in pieces, but for line ends, tabs and colours. */
function harmlessText(colours: boolean): HarmlessText {
  let held = '';
  let coloured = false;

  return {
    push(text) {
      const all = held + text;
      held = INCOMPLETE.exec(all)?.[0] ?? '';
      const whole = all.slice(0, all.length - held.length);
      return whole.replaceAll(CONTROL, replaced);
    },
    end: () => held.replaceAll(CONTROL, replaced),
    isColoured: () => coloured,
  };

  function replaced(found: string): string {
    if (found === '\n' || found === '\r' || found === '\t') return found;
    if (found.length === 1) return printable(found);
    coloured ||= colours;
    return colours ? found : '';
  }
}
