import { constants } from 'node:fs';
import { mkdir, mkdtemp, open, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';

/** The files of one run: gone when it has ended. */
export interface Workspace {
  /** Where the command runs if its project names no directory. */
  directory: string;
  /** Where it may write `name=value` lines. */
  outputPath: string;
  /** The first `limit` bytes of what it wrote there. */
  readOutput(limit: number): Promise<Buffer>;
  remove(): Promise<void>;
}

/** Makes a directory (mode 0700, random name) below `parent` for one run. Throws the system's error, a full disk as a rule. */
export async function makeWorkspace(parent: string): Promise<Workspace> {
  const root = await mkdtemp(join(parent, 'davit-run-'));
  const directory = join(root, 'work');
  const outputPath = join(root, 'output');
  await mkdir(directory, { mode: 0o700 });
  await writeFile(outputPath, '', { mode: 0o600 });

  return {
    directory,
    outputPath,
    readOutput: (limit) => readRegularFile(outputPath, limit),
    remove: () => rm(root, { recursive: true, force: true }),
  };
}

/** The command may have put anything in the file's place: a pipe that blocks, a link, nothing. */
async function readRegularFile(path: string, limit: number): Promise<Buffer> {
  const nothing = Buffer.alloc(0);
  const file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK | constants.O_NOFOLLOW).catch(
    () => null,
  );
  if (file === null) return nothing;
  try {
    if (!(await file.stat()).isFile()) return nothing;
    const { buffer, bytesRead } = await file.read(Buffer.alloc(limit), 0, limit, 0);
    return buffer.subarray(0, bytesRead);
  } catch {
    return nothing;
  } finally {
    await file.close();
  }
}
