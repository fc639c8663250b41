import type { Command, Option } from 'commander';

/** `davit` itself. */
export function rootOf(command: Command): Command {
  return command.parent === null ? command : rootOf(command.parent);
}

/** As it is typed: `davit admin queue`. */
export function pathOf(command: Command): string {
  return command.parent === null ? command.name() : `${pathOf(command.parent)} ${command.name()}`;
}

/** The options of the command and those of `davit`. */
export function allOptions(command: Command): Option[] {
  return [...command.options, ...rootOf(command).options];
}

/** Those that `--help` lists. */
export function visibleOptions(command: Command): Option[] {
  const help = command.createHelp();
  return [...help.visibleOptions(command), ...help.visibleGlobalOptions(command)];
}

/** The subcommands that `--help` lists. */
export function visibleCommands(command: Command): Command[] {
  return command.createHelp().visibleCommands(command);
}
