import { dirname } from 'node:path';
import type { Command } from 'commander';
import { timestamp } from '../domain.ts';
import { absolutePath, namesDirectory } from '../paths.ts';
import { printable } from '../printable.ts';
import type { FileFacts } from '../store/check.ts';
import { formatBytes } from './bytes.ts';
import { type CommandContext, explain, jsonOption, misused } from './command.ts';
import { counted } from './counted.ts';
import { existingDbPathOf } from './database-file.ts';
import { fillPartial, withPartial } from './file-work.ts';
import { printJson } from './results.ts';

/** `davit backup`. */
export function defineBackup(command: Command, context: CommandContext): void {
  explain(
    command,
    'Copies the file into a new one, with everything that is committed, also while the service runs, which is not ' +
      'disturbed. The copy gets its name once it is complete, checked and on the disk, and never replaces an existing ' +
      "file. It holds all of davit's secrets: keep it as safe as the file itself. 'davit restore' restores it.",
    [
      'davit backup /var/backups/davit-$(date +%F).db',
      'davit backup copy.db && rsync copy.db backup.example.com: && rm copy.db',
    ],
  )
    .argument('<file>', 'the copy; it must not exist yet')
    .addOption(jsonOption())
    .action((file: string, options: { json?: boolean }) => backup(command, file, options, context));
}

async function backup(
  command: Command,
  file: string,
  options: { json?: boolean },
  context: CommandContext,
): Promise<void> {
  if (file === '') misused(command, 'the name of the copy must not be empty');
  if (file === '-') misused(command, 'the copy is a file, not stdout: give it a name');
  if (namesDirectory(file)) misused(command, `the copy is one file: add its name to '${file}'`);
  const dbPath = existingDbPathOf(command);
  // Absolute, as SQLite takes a name that begins with `file:` for a URI.
  const path = absolutePath(file);
  const [{ refuseName }, { refuseToOpen }] = await Promise.all([
    import('../store/partial-file.ts'),
    import('../store/may-open.ts'),
  ]);
  refuseName(path, file);
  refuseToOpen(dbPath, context.effects);
  const at = timestamp(context.effects.now());
  await withPartial(dirname(path), context, async (partial, signal) => {
    const from = { path: absolutePath(dbPath), name: dbPath };
    const facts = await fillPartial('copy', from, partial, signal, context);
    partial.publishAs(path);
    if (options.json === true) printJson(context, { file, at, ...facts });
    else context.terminal.print(`${printable(file)}: ${contentsText(facts)}, checked, as of ${at}`);
  });
}

/** The contents of a file in a few words. */
export function contentsText({ bytes, projects, deployments, keys }: FileFacts): string {
  return [
    formatBytes(bytes),
    counted(projects, 'project'),
    counted(keys, 'key'),
    counted(deployments, 'deployment'),
  ].join(', ');
}
