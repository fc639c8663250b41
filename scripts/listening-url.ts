import type { ChildProcess } from 'node:child_process';
import { createInterface } from 'node:readline';

/** The address that `davit serve` prints once it is ready; undefined if it ends before. */
export async function listeningUrl(child: ChildProcess): Promise<string | undefined> {
  if (child.stdout === null) throw new Error('davit has no stdout');
  for await (const line of createInterface({ input: child.stdout })) {
    const url = /^davit listening on (\S+)$/.exec(line)?.[1];
    if (url !== undefined) return url;
  }
  return undefined;
}
