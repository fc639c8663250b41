import { version } from '../assets.ts';
import { AppError } from '../errors.ts';

/** A file with a newer schema than this davit's. */
export interface NewerFile {
  schemaVersion: number;
  /** The version of davit that made the schema; null if the file does not say. */
  davitVersion: string | null;
}

/** The error for such a file. Not in database.ts, so that using it does not load SQLite. */
export function newer(path: string, { schemaVersion, davitVersion }: NewerFile): AppError {
  // A davit that is not released yet has the version number of the last release, perhaps this one's.
  const needed =
    davitVersion === null || davitVersion === version ? 'a newer davit' : `davit ${davitVersion} or newer`;
  return new AppError(
    'conflict',
    `${path} needs ${needed}: its schema is ${schemaVersion}, and this is davit ${version}`,
  );
}
