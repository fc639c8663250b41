import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import Sqlite from 'better-sqlite3';
import type { Test } from 'tap';
import { realEffects } from '../../src/effects.ts';
import { openForWriting, SCHEMA_VERSION } from '../../src/store/database.ts';
import type { Migration } from '../../src/store/migrations.ts';
import { changeFile } from './files.ts';
import { temporaryDirectory } from './store.ts';

/*
 * Two schemas that there never were, in place of the two before the present one, and the steps from them to it: so the
 * machinery is tested with steps of every kind, whichever davit has.
 */

const FIXTURES = join(import.meta.dirname, '../fixtures/schemas');
const CURRENT = readFileSync(join(import.meta.dirname, '../../schema.sql'), 'utf8');

const REPLAYS = cut('CREATE TABLE replays', 'CREATE INDEX replays_open', ';');
const INSTANCE = cut('CREATE TABLE instance', ') STRICT;');
const PROJECTS = cut('CREATE TABLE projects', ') STRICT;');
const WAITING = cut('CREATE INDEX projects_waiting', ';');
const EVENTS_BY_AGE = cut('CREATE INDEX events_by_age', ';');
const VERSION_COLUMN = /, -- authenticates.*\n\s*davit_version .*\n/;

/** Without the version of the davit that wrote it, an index, and one of the states of a project. */
const BEFORE = version(SCHEMA_VERSION - 1, [
  [INSTANCE, INSTANCE.replace(VERSION_COLUMN, '\n')],
  [PROJECTS, PROJECTS.replace(" OR status = 'archived'", '')],
  [EVENTS_BY_AGE, ''],
]);

/** And without a whole table. */
const LONG_BEFORE = version(SCHEMA_VERSION - 2, [[REPLAYS, '']], BEFORE);

export const OLDER_SCHEMAS = new Map([
  [SCHEMA_VERSION - 2, LONG_BEFORE],
  [SCHEMA_VERSION - 1, BEFORE],
]);

/** From the first of them to the present one. */
export const STEPS: readonly Migration[] = [
  { version: SCHEMA_VERSION - 1, migrate: (database) => database.exec(REPLAYS) },
  {
    version: SCHEMA_VERSION,
    migrate(database) {
      database.exec(EVENTS_BY_AGE);
      remake(
        database,
        'instance',
        INSTANCE,
        "only_row, created_at, probes, webhook_changes, cursor_secret, '?'",
      );
      // Triggers of another table speak of this one, and rows of four others refer to it.
      remake(database, 'projects', PROJECTS, '*');
      database.exec(WAITING);
    },
  },
];

/** NODE_OPTIONS of a davit that has these steps. */
export const KNOWS_OLDER_SCHEMAS = `--import=${pathToFileURL(join(FIXTURES, 'preload.ts'))}`;

/** A file of the schema, with something in every table, as a davit of then leaves it. */
export function makeOlder(path: string, schema = SCHEMA_VERSION - 1): void {
  const rows = readFileSync(join(FIXTURES, `v${SCHEMA_VERSION}-rows.sql`), 'utf8')
    .replace(', davit_version)', ')')
    .replace(", '0.1.0')", ')')
    .replace(schema < SCHEMA_VERSION - 1 ? /INSERT INTO replays .*/ : /$^/, '');
  makeFile(path, OLDER_SCHEMAS.get(schema) ?? '', rows);
}

/** A file with the schema and the rows that the two texts make. */
export function makeFile(path: string, schema: string, rows: string): void {
  changeFile(path, `PRAGMA journal_mode = WAL; ${schema} ${rows}`);
}

/** What schema.sql makes, as `schemaOf` tells it. */
export function presentSchema(t: Test): string[] {
  const path = join(temporaryDirectory(t), 'present.db');
  openForWriting(path, realEffects).close();
  return schemaOf(path);
}

/** What there is in the file, without comments, line ends and the quotes that renaming adds. */
export function schemaOf(path: string): string[] {
  const database = new Sqlite(path, { fileMustExist: true });
  try {
    const texts = database
      .prepare<[], string>('SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name')
      .pluck()
      .all();
    return texts.map((text) =>
      text
        .replaceAll(/--.*$/gm, '')
        .replaceAll(/"(\w+)"/g, '$1')
        .replaceAll(/\s+/g, ' ')
        .replaceAll(/ ?([(),]) ?/g, '$1')
        .trim(),
    );
  } finally {
    database.close();
  }
}

/** How sqlite.org/lang_altertable.html, section 7, changes what ALTER TABLE cannot. */
function remake(database: Sqlite.Database, table: string, create: string, columns: string): void {
  database.exec(create.replace(`CREATE TABLE ${table}`, `CREATE TABLE new_${table}`));
  database.exec(`INSERT INTO new_${table} SELECT ${columns} FROM ${table}`);
  // AUTOINCREMENT goes on where it was, also when the last rows are gone.
  database.exec(`
    UPDATE sqlite_sequence SET seq = (SELECT seq FROM sqlite_sequence WHERE name = '${table}')
     WHERE name = 'new_${table}'`);
  database.exec(`DROP TABLE ${table}`);
  database.exec(`ALTER TABLE new_${table} RENAME TO ${table}`);
}

function version(number: number, changes: [from: string, to: string][], of = CURRENT): string {
  const all: [string, string][] = [
    ...changes,
    [/^PRAGMA user_version = .*$/m.exec(of)?.[0] ?? '', `PRAGMA user_version = ${number};`],
  ];
  return all.reduce((text, [from, to]) => {
    if (from === '' || from === to || !text.includes(from)) throw new Error(`schema.sql has no more ${from}`);
    return text.replace(from, () => to);
  }, of);
}

/** From the first text to the end of the last, each looked for after the one before. */
function cut(...texts: string[]): string {
  const begin = CURRENT.indexOf(texts[0] ?? '');
  const end = texts.reduce((from, text) => CURRENT.indexOf(text, from) + text.length, begin);
  return CURRENT.slice(begin, end);
}
