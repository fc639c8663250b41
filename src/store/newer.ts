import { version } from '../assets.ts';
import { AppError } from '../errors.ts';

/** A file that a davit wrote which knows more than this one. */
export interface NewerFile {
  schemaVersion: number;
  /** Which davit that was; null if the file does not say. */
  davitVersion: string | null;
}

/** Why it is refused. Apart from database.ts, so that nobody loads SQLite to say it. */
export function newer(path: string, { schemaVersion, davitVersion }: NewerFile): AppError {
  // One that is not released yet has the version of the last.
  const needed =
    davitVersion === null || davitVersion === version ? 'a newer davit' : `davit ${davitVersion} or newer`;
  return new AppError(
    'conflict',
    `${path} needs ${needed}: its schema is ${schemaVersion}, and this is davit ${version}`,
  );
}
