import { dirname } from 'node:path';
import { version as davitVersion } from '../assets.ts';
import { AppError } from '../errors.ts';
import { firstProblem } from './check.ts';
import { connect, type Database, kindOf, SCHEMA_VERSION, schemaVersionOf } from './database.ts';
import { beginExclusive } from './exclusive.ts';
import { syncDirectory } from './partial-file.ts';

/** The step from one schema to the next. */
export interface Migration {
  /** The schema that it makes out of the one before. */
  version: number;
  /**
   * References are not enforced meanwhile, and no trigger is looked at when a table is renamed: so a table whose
   * columns or checks change is made anew as sqlite.org/lang_altertable.html says in section 7 (create, copy, drop,
   * rename, then its indexes and triggers; what it has in sqlite_sequence goes along). Afterwards every reference is checked.
   */
  migrate(database: Database): void;
}

/**
 * Every step there is, in order. To change schema.sql once a version of it is released: change it and its
 * `user_version`, count SCHEMA_VERSION up, add the step here, and freeze the result for the tests with
 * `cp schema.sql test/fixtures/schemas/v<version>.sql`. test/store/migrations.test.ts holds that each frozen
 * schema is migrated to exactly what schema.sql makes. Before the release the copy is made anew.
 */
export const MIGRATIONS: readonly Migration[] = [
  {
    version: 2,
    migrate: (database) =>
      database.exec(`
        CREATE TABLE clock_settings (
          seq   INTEGER PRIMARY KEY AUTOINCREMENT,
          at    INTEGER NOT NULL,
          by_ms INTEGER NOT NULL
        ) STRICT`),
  },
];

interface MigrationOptions {
  /** Before each step, and once more, with null, before the result is checked. */
  onStep?: (version: number | null) => void;
  migrations?: readonly Migration[];
}

/**
 * Makes an older file one of this davit, in one transaction in which nobody else has it open, and checks all of it
 * before that is committed: whatever fails or dies, the file is as it was. A file of this davit is left alone.
 * Returns the schema that it had. Blocks the thread. Throws AppError `conflict` while another process has it open.
 * The caller holds `lockForServing`, unless nobody else knows of the file.
 */
export function migrateFile(
  path: string,
  { onStep, migrations = MIGRATIONS }: MigrationOptions = {},
): number {
  const database = connect(path);
  try {
    if (kindOf(database, path) !== 'older') return schemaVersionOf(database);
    database.pragma('synchronous = FULL');
    // Neither can be switched within a transaction.
    database.pragma('foreign_keys = OFF');
    database.pragma('legacy_alter_table = ON');
    beginExclusive(database, path);
    const from = schemaVersionOf(database);
    for (const { version, migrate } of stepsFrom(from, path, migrations)) {
      onStep?.(version);
      migrate(database);
    }
    database.prepare('UPDATE instance SET davit_version = ?').run(davitVersion);
    database.pragma(`user_version = ${SCHEMA_VERSION}`);
    onStep?.(null);
    const problem = firstProblem(database);
    if (problem !== undefined) throw new Error(`the migration of schema ${from} broke it: ${problem}`);
    database.exec('COMMIT');
    // The removed journal: it would undo all if a power cut brought it back.
    syncDirectory(dirname(path));
    return from;
  } finally {
    // Rolls back what is not committed.
    database.close();
  }
}

function stepsFrom(from: number, path: string, migrations: readonly Migration[]): Migration[] {
  const steps = migrations.filter(({ version }) => version > from && version <= SCHEMA_VERSION);
  if (steps[0]?.version === from + 1) return steps;
  throw new AppError('conflict', `no davit that is known here wrote ${path} (schema ${from})`);
}
