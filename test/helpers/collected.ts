import type { ChildProcess } from 'node:child_process';

export interface Collected {
  /** All that was printed so far. */
  text(): string;
  /** Resolves to it once this holds for it. Rejects if the process ends before that. */
  until(holds: RegExp | ((text: string) => boolean)): Promise<string>;
}

/** What a process prints on a pipe. */
export function collected(child: ChildProcess, output: 'stdout' | 'stderr' = 'stdout'): Collected {
  let text = '';
  let isOver = false;
  const waiting = new Set<() => void>();
  const lookAll = () => {
    for (const look of waiting) look();
  };
  child[output]?.setEncoding('utf8').on('data', (piece: string) => {
    text += piece;
    lookAll();
  });
  child.once('close', () => {
    isOver = true;
    lookAll();
  });
  return {
    text: () => text,
    until: (holds) =>
      new Promise((resolve, reject) => {
        const look = () => {
          const isFound = holds instanceof RegExp ? holds.test(text) : holds(text);
          if (!isFound && !isOver) return;
          waiting.delete(look);
          if (isFound) resolve(text);
          else reject(new Error(`it ended, and had printed: ${text}`));
        };
        waiting.add(look);
        look();
      }),
  };
}
