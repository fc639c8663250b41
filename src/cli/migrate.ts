import { rmSync, statSync } from 'node:fs';
import { dirname } from 'node:path';
import type { Command } from 'commander';
import { timestamp } from '../domain.ts';
import { realPath } from '../paths.ts';
import { printable } from '../printable.ts';
import type { PartialFile } from '../store/partial-file.ts';
import { type CommandContext, explain, jsonOption } from './command.ts';
import { existingDbPathOf } from './database-file.ts';
import { fillPartial, migrateInPlace, NOTHING_CHANGED, withPartial } from './file-work.ts';
import { printJson } from './results.ts';

/** The result of a migration. */
interface Migrated {
  from_schema: number;
  to_schema: number;
  /** The path of a copy of the file as it was. */
  kept_as: string;
}

/** Is told how far a migration is. */
interface MigrationListener {
  /** The file is locked for this davit alone, to be migrated to this schema. */
  onBegin(schema: number): Promise<void>;
  onKept(keptAs: string): void;
  onStep(schema: number): void;
}

/** `davit admin migrate`. */
export function defineMigrate(command: Command, context: CommandContext): void {
  explain(
    command,
    'Migrates the file of an older davit, as davit serve does at its start, but starts nothing, so that davit admin can be ' +
      'used before the service runs. The older davit must be stopped. First a checked copy is kept beside the file; then ' +
      'everything is changed and checked in one transaction, or nothing is.',
    ['davit admin migrate && davit admin project pause website'],
  )
    .addOption(jsonOption())
    .action((options: { json?: boolean }) => migrate(command, options, context));
}

async function migrate(
  command: Command,
  options: { json?: boolean },
  context: CommandContext,
): Promise<void> {
  const { terminal } = context;
  const dbPath = existingDbPathOf(command);
  const migrated = await migrateOlder(dbPath, context);
  if (options.json === true) {
    printJson(context, { file: dbPath, migrated: migrated !== null, ...migrated });
    return;
  }
  if (migrated === null) {
    terminal.print(`${printable(dbPath)} is up to date: there is nothing to do`);
    return;
  }
  const { from_schema, to_schema, kept_as } = migrated;
  terminal.print(`${printable(dbPath)} is migrated from schema ${from_schema} to ${to_schema}`);
  terminal.note(`the file as it was is kept as ${printable(kept_as)}: remove it once all is well`);
}

/**
 * Migrates a file of an older davit, locked for this one alone, after keeping a checked copy beside it; null: the file
 * is missing or needs no migration. Throws AppError, and the file is as it was, if it must not be served (see
 * `refuseToServe`), another process has it open or writes to it meanwhile, or there is no room. SIGINT, SIGTERM and SIGHUP
 * end davit meanwhile.
 */
export async function migrateOlder(
  dbPath: string,
  context: CommandContext,
  listener?: MigrationListener,
): Promise<Migrated | null> {
  const [{ isOlder, SCHEMA_VERSION }, { refuseToServe }] = await Promise.all([
    import('../store/database.ts'),
    import('../store/may-open.ts'),
  ]);
  refuseToServe(dbPath);
  if (!isOlder(dbPath)) return null;
  const [{ lockForServing }, { refuseWhileOpen }, { giveToOwner }] = await Promise.all([
    import('../store/lock.ts'),
    import('../store/exclusive.ts'),
    import('../store/publish.ts'),
  ]);
  // The file itself, if this is a link to it.
  const path = realPath(dbPath);
  const unlock = lockForServing(path, process.pid, context.effects);
  let published: string | undefined;
  try {
    // Another davit may have migrated it before the lock was this one's.
    if (!isOlder(path)) return null;
    // A service that is restarted every second must not copy and check the whole file each time, to be refused then.
    const lastWrite = refuseWhileOpen(path);
    await listener?.onBegin(SCHEMA_VERSION);
    return await withPartial(
      dirname(path),
      context,
      (partial, signal) => keepAndMigrate(partial, lastWrite, signal),
      stoppedNote,
    );
  } finally {
    unlock();
  }

  async function keepAndMigrate(
    partial: PartialFile,
    lastWrite: string,
    signal: AbortSignal,
  ): Promise<Migrated> {
    const file = { path, name: dbPath, lastWrite };
    const { schema_version } = await fillPartial('copy', file, partial, signal, context);
    giveToOwner([partial.path], statSync(path));
    const at = timestamp(context.effects.now()).replaceAll(':', '-');
    const keptAs = `${path}.before-v${SCHEMA_VERSION}-${at}`;
    partial.publishAs(keptAs);
    published = keptAs;
    listener?.onKept(keptAs);
    try {
      await migrateInPlace(file, signal, context, (message) => {
        if (message.kind === 'migrating') listener?.onStep(message.version);
      });
    } catch (error) {
      removeNeedless(keptAs);
      throw error;
    }
    return { from_schema: schema_version, to_schema: SCHEMA_VERSION, kept_as: keptAs };
  }

  function stoppedNote(): string {
    return published === undefined || removeNeedless(published)
      ? NOTHING_CHANGED
      : `stopped while it was migrated: the file as it was is kept as ${printable(published)}`;
  }

  /**
   * Removes the copy if the file is unchanged: a service that is restarted every second must not fill the disk with
   * copies. Waits for what changes it, which may have been killed just now, and undoes what that has not committed.
   */
  function removeNeedless(keptAs: string): boolean {
    const isNeedless = isUnchanged();
    if (isNeedless) rmSync(keptAs, { force: true });
    return isNeedless;
  }

  function isUnchanged(): boolean {
    try {
      return isOlder(path);
    } catch {
      return false; // then the copy is worth more than its room, and why the migration failed more than this error
    }
  }
}
