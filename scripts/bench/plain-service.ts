import { join } from 'node:path';
import type { Plugin } from '@hapi/hapi';
import { realEffects } from '../../src/effects.ts';
import { createAnswers } from '../../src/http/answers.ts';
import { authentication } from '../../src/http/auth.ts';
import { deployments } from '../../src/http/deployments.ts';
import { createPages } from '../../src/http/pages.ts';
import { createHttpServer } from '../../src/http/server.ts';
import { createWatches } from '../../src/http/watches.ts';
import { createLogger } from '../../src/logger.ts';
import { type Database, openForWriting } from '../../src/store/database.ts';
import { makeOperations } from '../../src/store/operations.ts';
import { type Store, storeOn } from '../../src/store/store.ts';
import type { Writer } from '../../src/store/writer.ts';

/**
 * A plain implementation: davit's own API, validation, statements and log, but each write is a commit of its own, made
 * where its request is handled. Accepts deployments for `davit.db` in `directory`; resolves to its URL.
 */
export async function startPlainService(directory: string): Promise<string> {
  const effects = realEffects;
  const database = openForWriting(join(directory, 'davit.db'), effects);
  const store: Store = { ...storeOn(database, effects), writer: plainWriter(database) };
  const logger = createLogger({ level: 'info', form: 'json' }, realEffects);
  const pages = createPages(store.reads.instance.cursorSecret(), effects);
  const resources: Plugin<void>[] = [
    deployments(
      store.reads,
      createAnswers(store.writer),
      pages,
      createWatches(store.writer, effects),
      effects,
      null,
    ),
  ];
  const server = await createHttpServer(
    {
      listen: { host: '127.0.0.1', port: 0 },
      tls: null,
      rateLimit: { limit: 999_999, windowMs: 1_000 },
    },
    {
      authentication: authentication(store, [], effects, logger),
      resources,
    },
    effects,
    logger,
  );
  await server.start();
  return `http://127.0.0.1:${server.info.port}`;
}

/** One `BEGIN IMMEDIATE … COMMIT` for each write, at once; SQLite checkpoints automatically. */
function plainWriter(database: Database): Writer {
  const operations = makeOperations({ database, effects: realEffects, changed: () => undefined });
  return {
    write: async (name, input) =>
      database.transaction(() => operations[name](input as never)).immediate() as never,
    onCommit: () => undefined,
    close: async () => void database.close(),
  };
}
