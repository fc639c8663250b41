import { realpathSync, rmSync, statSync } from 'node:fs';
import { dirname } from 'node:path';
import type { Command } from 'commander';
import { timestamp } from '../domain.ts';
import { printable } from '../printable.ts';
import { type CommandContext, existingDbPathOf, explain, jsonOption, printJson } from './command.ts';
import { fillPartial, migrateInPlace, withPartial } from './file-work.ts';

/** What became of an older file. */
interface Migrated {
  from_schema: number;
  to_schema: number;
  /** A whole copy of it as it was. */
  kept_as: string;
}

/** Who follows a migration. */
interface Onlooker {
  /** It is this davit's alone now. */
  onBegin(): void;
  onKept(keptAs: string): void;
  onStep(schema: number): void;
}

/** `davit admin migrate`. */
export function defineMigrate(command: Command, context: CommandContext): void {
  explain(
    command,
    'Brings the file of an older davit up to this one, as davit serve does at its start, and starts nothing: to look at ' +
      'it or change it before. The older davit must be stopped. A checked copy is kept beside the file first; then all ' +
      'is changed and checked in one transaction, or nothing is.',
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
    terminal.print(`${printable(dbPath)} is of this davit already: there is nothing to do`);
    return;
  }
  const { from_schema, to_schema, kept_as } = migrated;
  terminal.print(`${printable(dbPath)} is migrated from schema ${from_schema} to ${to_schema}`);
  terminal.note(`what it was is kept as ${printable(kept_as)}: remove it once all is well`);
}

/**
 * Brings a file of an older davit up to this one, as its only user, after a checked copy was kept beside it; gives
 * null for a file that needs none, or that is not there. Throws AppError, and the file is as it was, while somebody
 * has it or when there is no room. SIGINT, SIGTERM and SIGHUP end davit meanwhile.
 */
export async function migrateOlder(
  dbPath: string,
  context: CommandContext,
  onlooker?: Onlooker,
): Promise<Migrated | null> {
  const { isOlder, SCHEMA_VERSION } = await import('../store/database.ts');
  if (!isOlder(dbPath)) return null;
  const [{ lockForServing }, { giveToOwner }] = await Promise.all([
    import('../store/lock.ts'),
    import('../store/partial-file.ts'),
  ]);
  // Of a link the file that it leads to.
  const path = realpathSync(dbPath);
  const unlock = lockForServing(path, process.pid, context.effects);
  try {
    onlooker?.onBegin();
    return await withPartial(dirname(path), context, async (partial, signal, stopped) => {
      const file = { path, name: dbPath };
      const { schema_version } = await fillPartial('copy', file, partial, signal, context);
      giveToOwner([partial.path], statSync(path));
      const at = timestamp(context.effects.now()).replaceAll(':', '-');
      const keptAs = `${path}.before-v${SCHEMA_VERSION}-${at}`;
      partial.publishAs(keptAs);
      onlooker?.onKept(keptAs);
      stopped.note = `stopped while it was migrated: the file as it was is kept as ${printable(keptAs)}`;
      try {
        await migrateInPlace(file, signal, context, (message) => {
          if (message.kind === 'migrating') onlooker?.onStep(message.version);
        });
      } catch (error) {
        // Who tries again every second must not fill the disk with copies of a file that is as it was.
        if (isOlder(path)) rmSync(keptAs);
        throw error;
      }
      return { from_schema: schema_version, to_schema: SCHEMA_VERSION, kept_as: keptAs };
    });
  } finally {
    unlock();
  }
}
