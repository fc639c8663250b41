import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Test } from 'tap';
import { SCHEMA_VERSION } from '../../src/store/database.ts';
import { changeFile } from './files.ts';
import { makeFile } from './older-schema.ts';
import { temporaryDirectory } from './store.ts';

const [SCHEMA = '', ROWS = ''] = ['', '-rows'].map((suffix) =>
  readFileSync(join(import.meta.dirname, `../fixtures/schemas/v${SCHEMA_VERSION}${suffix}.sql`), 'utf8'),
);

/** A file with rows in every table, changed by `sql` without checks of foreign keys. */
export function filledFile(t: Test, sql = ''): string {
  const path = join(temporaryDirectory(t), 'davit.db');
  makeFile(path, SCHEMA, ROWS);
  changeFile(path, sql);
  return path;
}

/** Swaps the entries of two indexes, which no read notices. */
export function swapIndexes(path: string, one: string, other: string): void {
  const both = `('${one}', '${other}')`;
  changeFile(
    path,
    `PRAGMA writable_schema = ON;
     UPDATE sqlite_schema SET rootpage = o.rootpage FROM sqlite_schema o
      WHERE sqlite_schema.name IN ${both} AND o.name IN ${both} AND o.name <> sqlite_schema.name`,
  );
}
