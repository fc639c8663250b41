import { type LoggerOptions, pino } from 'pino';

/** A logger, and what is logged with it, as it is written. */
export function keptLog<Line = Record<string, unknown>>(options: LoggerOptions = {}) {
  const lines: Line[] = [];
  const logger = pino(options, { write: (line) => void lines.push(JSON.parse(line)) });
  return { logger, lines };
}
