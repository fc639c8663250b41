import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import type { Test } from 'tap';
import { SCHEMA_VERSION } from '../../src/store/database.ts';
import { makeFile } from './older-schema.ts';
import { temporaryDirectory } from './store.ts';

const [SCHEMA = '', ROWS = ''] = ['', '-rows'].map((suffix) =>
  readFileSync(join(import.meta.dirname, `../fixtures/schemas/v${SCHEMA_VERSION}${suffix}.sql`), 'utf8'),
);

/** A file with rows in every table, changed by `sql` without checks of foreign keys. */
export function filledFile(t: Test, sql = ''): string {
  const path = join(temporaryDirectory(t), 'davit.db');
  makeFile(path, SCHEMA, ROWS);
  const database = new Sqlite(path);
  database.pragma('foreign_keys = OFF');
  database.exec(sql);
  database.close();
  return path;
}

/** Swaps the entries of two indexes, which no read notices. */
export function swapIndexes(path: string, one: string, other: string): void {
  const database = new Sqlite(path);
  database.unsafeMode();
  database.pragma('writable_schema = ON');
  const pageOf = database.prepare('SELECT rootpage FROM sqlite_schema WHERE name = ?').pluck();
  const move = database.prepare('UPDATE sqlite_schema SET rootpage = ? WHERE name = ?');
  const pages = [pageOf.get(one), pageOf.get(other)];
  move.run(pages[1], one);
  move.run(pages[0], other);
  database.close();
}
