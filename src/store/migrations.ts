import { dirname } from 'node:path';
import { version as davitVersion } from '../assets.ts';
import { AppError } from '../errors.ts';
import { firstProblem } from './check.ts';
import { connect, type Database, kindOf, SCHEMA_VERSION, schemaVersionOf } from './database.ts';
import { beginExclusive, lastWriteOf } from './exclusive.ts';
import { syncDirectory } from './publish.ts';

/** The step from one schema to the next. */
export interface Migration {
  /** The schema version after the step. */
  version: number;
  /**
   * Runs with foreign keys not enforced, and with legacy_alter_table, so that renaming a table does not check triggers.
   * To change a table's columns or checks, recreate it as described in sqlite.org/lang_altertable.html, section 7:
   * create, copy, drop, rename, then its indexes and triggers; copy its row of sqlite_sequence, too. `remake` in
   * test/helpers/older-schema.ts does it. Afterwards all references are checked.
   */
  migrate(database: Database): void;
}

/**
 * All steps, in order. To change schema.sql once its version is released: change it and its `user_version`, increment
 * SCHEMA_VERSION, add the step here, and freeze the result for the tests with
 * `cp schema.sql test/fixtures/schemas/v<version>.sql`, with at least one row of every table in `v<version>-rows.sql`
 * beside it. test/store/migrations.test.ts checks that each frozen schema is migrated to exactly what schema.sql creates.
 * Until the version is released, repeat the copy after each change.
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
  {
    version: 3,
    // When open replays were requested is known by the clock only. As if requested now, they leave nothing out.
    migrate: (database) =>
      database.exec(`
        ALTER TABLE replays ADD COLUMN last_attempt INTEGER NOT NULL DEFAULT 0;
        UPDATE replays SET last_attempt = coalesce((SELECT max(rowid) FROM attempts), 0)`),
  },
  {
    version: 4,
    migrate: (database) => database.exec('DROP TRIGGER deployment_joins_queue'),
  },
];

interface MigrationOptions {
  /** Called before each step, and with null before the result is checked. */
  onStep?: (version: number | null) => void;
  migrations?: readonly Migration[];
  /** What `lastWriteOf` returned before the file was copied: the copy must have every write. */
  lastWrite?: string | undefined;
}

/**
 * Migrates an older file to this davit's schema, in one exclusive transaction, and checks the whole file before the
 * commit: if a step fails or the process dies, the file is unchanged. So is a file that already has this schema. Blocks
 * the thread. Throws AppError `conflict` while another process has the file open, and if one has written to it since
 * `lastWrite`. The caller must hold `lockForServing`, unless no other process knows of the file.
 */
export function migrateFile(
  path: string,
  { onStep, migrations = MIGRATIONS, lastWrite }: MigrationOptions = {},
): void {
  const database = connect(path);
  try {
    if (kindOf(database, path) !== 'older') return;
    database.pragma('synchronous = FULL');
    // Neither can be changed within a transaction.
    database.pragma('foreign_keys = OFF');
    database.pragma('legacy_alter_table = ON');
    beginExclusive(database, path);
    if (lastWrite !== undefined && lastWriteOf(path) !== lastWrite) throw writtenMeanwhile(path);
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
    // Makes the removal of the journal durable: a journal that a power cut brought back would undo the migration.
    syncDirectory(dirname(path));
  } finally {
    // Rolls back an uncommitted migration.
    database.close();
  }
}

function writtenMeanwhile(path: string): AppError {
  return new AppError(
    'conflict',
    `another process, perhaps a davit admin command, has written to ${path} since it was copied: try again when it has ended`,
  );
}

function stepsFrom(from: number, path: string, migrations: readonly Migration[]): Migration[] {
  const steps = migrations.filter(({ version }) => version > from && version <= SCHEMA_VERSION);
  if (steps[0]?.version === from + 1) return steps;
  throw new AppError('conflict', `${path} has schema ${from}, which this davit does not know`);
}
