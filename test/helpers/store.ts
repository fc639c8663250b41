import { mkdtempSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { MessagePort } from 'node:worker_threads';
import Sqlite from 'better-sqlite3';
import type { Test } from 'tap';
import {
  type DeploymentId,
  type KeyId,
  type ProjectId,
  parseRef,
  type Ref,
  SCOPES,
} from '../../src/domain.ts';
import type { Effects } from '../../src/effects.ts';
import { type Database, openForReading, openForWriting } from '../../src/store/database.ts';
import type { Caller, NewKey } from '../../src/store/keys.ts';
import type { LogAppend } from '../../src/store/logs.ts';
import type { ProjectSettings } from '../../src/store/projects.ts';
import type { NewDeployment } from '../../src/store/queue.ts';
import type { Report } from '../../src/store/reports.ts';
import { type Store, startWriterThread, storeOn } from '../../src/store/store.ts';
import type { DeploymentEnd } from '../../src/store/transitions.ts';
import { fakeEffects } from './effects.ts';

/** A directory of the test's own, gone when the test has ended. Named as the system names it, where TMPDIR is a link. */
export function temporaryDirectory(t: Test): string {
  const directory = realpathSync(mkdtempSync(join(tmpdir(), 'davit-test-')));
  t.teardown(() => rmSync(directory, { recursive: true, force: true }));
  return directory;
}

/** A store with its writer thread, to be closed by the test; the test fails if that thread dies. */
export function openWithThread(
  t: Test,
  path: string,
  { ports = [], metricsMemory }: { ports?: MessagePort[]; metricsMemory?: SharedArrayBuffer } = {},
): Promise<Store> {
  return startWriterThread((error) => t.fail('the writer died', { error })).open(path, ports, metricsMemory);
}

export interface TestStore extends Store, Makers {
  path: string;
  /** What the file holds, asked on a connection of its own. */
  query<Row = Record<string, unknown>>(sql: string, ...parameters: unknown[]): Row[];
  /** Another connection, as each thread that reads has one; closed when the test has ended. */
  openReader(): Database;
  /** Runs SQL past the rules of the code. */
  execute(sql: string): void;
  /** Every row of every table, to show that a refusal changed nothing. */
  dump(): Record<string, unknown[]>;
  /** As a full disk does: no page can be added any more. */
  limitPages(limited: boolean): void;
}

export interface Makers {
  project(settings?: Partial<ProjectSettings>): Promise<ProjectId>;
  key(changes?: Partial<NewKey>): Promise<{ keyId: KeyId; secret: string }>;
}

/** A real file with the whole schema, written in this thread. */
export function testStore(t: Test, effects: Effects = fakeEffects()): TestStore {
  const path = join(temporaryDirectory(t), 'davit.db');
  const database = openForWriting(path, effects);
  const store = storeOn(database, effects);
  const reader = new Sqlite(path, { readonly: true });
  t.teardown(async () => {
    reader.close();
    await store.close();
  });

  return {
    ...store,
    ...makers(store),
    path,
    query: <Row>(sql: string, ...parameters: unknown[]) => reader.prepare(sql).all(...parameters) as Row[],
    openReader() {
      const database = openForReading(path);
      t.teardown(() => database.close());
      return database;
    },
    execute: (sql) => {
      database.exec(sql);
    },
    dump: () => dumpOf(reader),
    limitPages(limited) {
      const pages = limited ? Number(database.pragma('page_count', { simple: true })) + 2 : 1_073_741_823;
      database.pragma(`max_page_count = ${pages}`);
    },
  };
}

/** Makes projects and keys, like `PROJECT` and `KEY` but for what is said. */
export function makers({ writer }: Store): Makers {
  return {
    async project(settings = {}) {
      const project = await writer.write('projects.create', { ...PROJECT, ...settings });
      return project.id;
    },
    async key(changes = {}) {
      const { key, secret } = await writer.write('keys.create', { ...KEY, ...changes });
      return { keyId: key.id, secret };
    },
  };
}

/** Every row of every table of a file. */
export function dumpOf(reader: Sqlite.Database): Record<string, unknown[]> {
  const tables = reader
    .prepare<[], string>(
      "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name",
    )
    .pluck()
    .all();
  return Object.fromEntries(tables.map((table) => [table, reader.prepare(`SELECT * FROM ${table}`).all()]));
}

export function ref(text: string): Ref {
  const result = parseRef(text);
  if (!result.ok) throw new Error(`not a ref: ${text}`);
  return result.ref;
}

export function newDeployment(projectId: ProjectId, changes: Partial<NewDeployment> = {}): NewDeployment {
  return {
    projectId,
    ref: ref('main'),
    trigger: 'api',
    keyId: null,
    redeployOf: null,
    maxQueued: 100,
    ...changes,
  };
}

/** The end of a deployment, by default a success. */
export function endOf(id: DeploymentId, changes: Partial<DeploymentEnd> = {}): DeploymentEnd {
  return {
    id,
    status: 'succeeded',
    reason: null,
    message: null,
    exitCode: null,
    signal: null,
    outputs: {},
    ...changes,
  };
}

/** What is appended to a log: these chunks, the last of which ends it, by default none of them in its head. */
export function appendTo(
  id: DeploymentId,
  chunks: LogAppend['chunks'],
  changes: Partial<LogAppend> = {},
): LogAppend {
  const last = chunks.at(-1);
  const logBytes = last === undefined ? 0 : last.start + last.bytes.length;
  return { id, chunks, logBytes, dropTailBefore: null, headBytes: 0, ...changes };
}

/** The report of another system, by default that the deployment runs. */
export function reportFor(id: DeploymentId, changes: Partial<Report> = {}): Report {
  return { id, status: 'running', message: null, outputs: null, ...changes };
}

/** The types of a deployment's events, in order. */
export function eventsOf(store: TestStore, id: DeploymentId): string[] {
  return store
    .query<{ type: string }>('SELECT type FROM events WHERE deployment_id = ? ORDER BY seq', id)
    .map(({ type }) => type);
}

/** For what must be there: `const [first = none()] = …`. */
export function none(): never {
  throw new Error('there is none');
}

/** The caller of a request with this key. */
export function caller({ keyId }: { keyId: KeyId }, allProjects = true): Caller {
  return { keyId, scopes: [], allProjects, lastUsedAtMs: null };
}

/** Default settings of a test's project. */
export const PROJECT: ProjectSettings = {
  name: 'website',
  command: ['/bin/true'],
  directory: null,
  timeoutMs: 30 * 60_000,
  idleTimeoutMs: null,
  reportTimeoutMs: null,
  policy: 'queue',
  variables: {},
};

/** A key with all scopes and projects. */
export const KEY: NewKey = {
  name: 'ci',
  scopes: [...SCOPES],
  allProjects: true,
  projectIds: [],
  expiresInMs: null,
};

/** The same connection, whose statements are what `prepare` gives. */
export function preparedBy(database: Database, prepare: (sql: string) => unknown): Database {
  return new Proxy(database, {
    get: (target, name) => (name === 'prepare' ? prepare : Reflect.get(target, name)),
  });
}

/** The same connection, and how many rows its statements with `count(*)` have counted. */
export function countingRows(database: Database): { database: Database; counted(): number } {
  let counted = 0;
  const counting = preparedBy(database, (sql) => {
    const statement = database.prepare(sql);
    if (!sql.includes('count(*)')) return statement;
    const get = (...parameters: unknown[]) => {
      const count = Number(statement.pluck().get(...parameters));
      counted += count;
      return count;
    };
    return { pluck: () => ({ get }) };
  });
  return { database: counting, counted: () => counted };
}
