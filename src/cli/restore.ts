import { existsSync, statSync } from 'node:fs';
import { dirname } from 'node:path';
import type { Command } from 'commander';
import { timestamp } from '../domain.ts';
import { AppError } from '../errors.ts';
import { option } from '../options.ts';
import { absolutePath, realPath } from '../paths.ts';
import { printable } from '../printable.ts';
import type { FileFacts } from '../store/check.ts';
import { contentsText } from './backup.ts';
import { formatBytes } from './bytes.ts';
import { type CommandContext, explain, jsonOption, misused } from './command.ts';
import { type ConfirmedOptions, confirm } from './confirm.ts';
import { counted } from './counted.ts';
import { dbPathOf } from './database-file.ts';
import { fillPartial, migrateInPlace, withPartial } from './file-work.ts';
import { exactMoment } from './moments.ts';
import { printJson } from './results.ts';

/** `davit restore`. */
export function defineRestore(command: Command, context: CommandContext): void {
  explain(
    command,
    'Restores a copy that davit backup made: checks it, keeps the current file under another name, and puts a copy of ' +
      'the backup in its place. The service must be stopped. Started again, it goes on with the keys, cursors, queues ' +
      'and deliveries of the time of the backup.\n\n' +
      'Deployments that were running then are ended and recorded as interrupted at the next start, even if they still ' +
      'run for the service that the backup is of; their processes are identified by id, start time and boot, so that ' +
      'no others are ended. Deployments that were waiting then are started, even if they have run since: to prevent ' +
      'that, cancel them or pause their projects before davit serve. Deliveries that were made since may be sent once ' +
      'more, with the same event ids.',
    [
      'systemctl stop davit && davit restore copy.db && systemctl start davit',
      'davit restore copy.db --db /srv/new/davit.db',
    ],
  )
    .argument('<file>', 'the copy; it stays as it is')
    .addOption(option('--yes', 'do not ask for confirmation'))
    .addOption(jsonOption())
    .action((file: string, options: ConfirmedOptions) => restore(command, file, options, context));
}

async function restore(
  command: Command,
  file: string,
  options: ConfirmedOptions,
  context: CommandContext,
): Promise<void> {
  const { terminal, effects } = context;
  if (file === '') misused(command, 'the name of the copy must not be empty');
  if (file === '-') misused(command, 'the copy is a file, not stdin: give its name');
  const dbPath = dbPathOf(command);
  const [{ adoptedBytes, replaceDatabase }, { lockForServing }, { SCHEMA_VERSION }] = await Promise.all([
    import('../store/restore.ts'),
    import('../store/lock.ts'),
    import('../store/database.ts'),
  ]);
  // Links are resolved, as SQLite and the lock do: the file itself is replaced, not a link to it.
  const path = realPath(dbPath);
  adoptedBytes(file);
  await refuseServed(dbPath, file, path);
  // If nobody can be asked, this fails before the work is done.
  if (existsSync(path) && !terminal.canAsk) await confirm(command, '', options.yes, context);
  await withPartial(dirname(path), context, async (partial, signal) => {
    const unlock = lockForServing(path, process.pid, effects);
    try {
      await refuseWhileRunning(dbPath, path);
      const from = { path: absolutePath(file), name: file };
      const facts = await fillPartial('adopt', from, partial, signal, context);
      const migratedFrom = facts.schema_version < SCHEMA_VERSION ? facts.schema_version : null;
      if (migratedFrom !== null) {
        await migrateInPlace({ path: partial.path, name: file }, signal, context);
        facts.schema_version = SCHEMA_VERSION;
      }
      // Only now, as it may have appeared meanwhile.
      if (existsSync(path))
        await confirm(command, question(dbPath, path, file, facts, context), options.yes, context);
      const asidePath = `${path}.before-restore-${timestamp(effects.now()).replaceAll(':', '-')}`;
      const kept = replaceDatabase(path, partial.path, asidePath);
      report(dbPath, kept ? asidePath : null, { ...facts, migrated_from: migratedFrom }, options, context);
    } finally {
      unlock();
    }
  });
}

/** Throws AppError `conflict` if a service serves the file that is replaced, or the copy. */
async function refuseServed(dbPath: string, file: string, path: string): Promise<void> {
  const [{ holderText, servedBy }, { refuseMovedHere }] = await Promise.all([
    import('../store/holder.ts'),
    import('../store/other-names.ts'),
  ]);
  const here = statSync(path, { throwIfNoEntry: false });
  const there = statSync(file);
  if (here?.ino === there.ino && here.dev === there.dev) {
    throw new AppError('conflict', `${file} is the file that would be replaced: give a copy of it`);
  }
  refuseMovedHere(path);
  refuseMovedHere(file);
  const service = servedBy(path);
  if (service !== null) {
    throw new AppError('conflict', `${dbPath} is served${holderText(service)}: stop that service first`);
  }
  if (servedBy(file) !== null) {
    throw new AppError('conflict', `${file} is served itself: give a copy of it that davit backup made`);
  }
}

/**
 * Throws AppError `conflict` if deployments of the replaced file still run: the restored one would not know of them.
 */
async function refuseWhileRunning(dbPath: string, path: string): Promise<void> {
  const [{ runningIn }, { findMarked }] = await Promise.all([
    import('../store/restore.ts'),
    import('../deploy/processes.ts'),
  ]);
  const ids = new Set<string>(runningIn(path));
  if (ids.size === 0) return;
  for (const [id, [process]] of await findMarked(ids)) {
    throw new AppError(
      'conflict',
      `deployment ${id} of ${dbPath} is still running as process ${process?.processId}: end it, or start and stop davit, which ends it`,
    );
  }
}

function question(
  dbPath: string,
  path: string,
  file: string,
  facts: FileFacts,
  context: CommandContext,
): string {
  const { size, mtimeMs } = statSync(path);
  const old = `${printable(dbPath)} (${formatBytes(size)}, changed ${exactMoment(context, timestamp(mtimeMs))})`;
  return `${old} is kept under another name. Replace it with ${printable(file)} (${contentsText(facts)}, last used ${exactMoment(context, facts.last_event_at)})?`;
}

function report(
  dbPath: string,
  keptAs: string | null,
  facts: FileFacts & { migrated_from: number | null },
  { json }: ConfirmedOptions,
  context: CommandContext,
): void {
  const { terminal } = context;
  if (json === true) {
    printJson(context, { file: dbPath, kept_as: keptAs, ...facts });
    return;
  }
  terminal.print(
    `${printable(dbPath)} is restored: ${contentsText(facts)}, last used ${facts.last_event_at}`,
  );
  const { migrated_from, schema_version } = facts;
  if (migrated_from !== null) {
    terminal.note(
      `it is migrated from schema ${migrated_from} to ${schema_version}; the copy stays as it is`,
    );
  }
  if (keptAs !== null)
    terminal.note(`the replaced file is kept as ${printable(keptAs)}: remove it once all is well`);
  const next = [
    part('starts', facts.waiting_deployments, 'deployment that waited', 'deployments that waited'),
    part(
      'ends where it still runs, and records as interrupted,',
      facts.running_deployments,
      'deployment that was running',
      'deployments that were running',
    ),
    part('sends', facts.pending_deliveries, 'delivery', 'deliveries'),
  ].filter((text) => text !== '');
  if (next.length > 0) terminal.note(`davit serve now ${next.join(', ')}`);
}

function part(verb: string, count: number, one: string, many: string): string {
  return count === 0 ? '' : `${verb} ${counted(count, one, many)}`;
}
