import type { Command } from 'commander';
import { printable } from '../printable.ts';
import { nearest } from './suggest.ts';

/** From now on every error of usage is one line, says where to look, and repeats no value. */
export function explainErrors(command: Command): void {
  command.configureOutput({
    outputError(text, write) {
      const message = withSuggestion(withoutValue(text.trim()), command).replace(
        /\s*\((Did you mean .*\?)\)$/s,
        (_, question: string) => `: ${lowerFirst(question)}`,
      );
      const hint = message.endsWith('?') ? '' : ` (see '${pathOf(command)} --help')`;
      const line = withoutSecrets(message)
        .replace(/\.$/, '')
        .replaceAll(/\s*\n\s*/g, ' ');
      write(`${printable(line)}${hint}`);
    },
  });
  for (const subcommand of command.commands) explainErrors(subcommand);
}

/** What commander says of a value, without the value: it may be a secret that got into the wrong place. */
function withoutValue(message: string): string {
  return message
    .replace(/^(error: option '[^']*' value) '.*'( from env '\w+' is invalid)/s, '$1$2')
    .replace(/^(error: (?:option '[^']*' argument|command-argument value)) '.*'( is invalid)/s, '$1$2')
    .replace(/^(error: too many arguments.*? but got \d+): .*$/s, '$1')
    .replace(/^(error: unknown option '[^=]*)=.*'/s, "$1'");
}

/** Commander takes `--ulr=…` as a whole, and finds nothing like it. */
function withSuggestion(message: string, command: Command): string {
  const [, flag] = /^error: unknown option '(--.*)'$/s.exec(message) ?? [];
  if (flag === undefined) return message;
  const help = command.createHelp();
  const options = [...help.visibleOptions(command), ...help.visibleGlobalOptions(command)];
  const meant = nearest(
    flag,
    options.flatMap(({ long }) => long ?? []),
  );
  return meant === undefined ? message : `${message}: did you mean ${meant}?`;
}

/** The text with neither keys and signing secrets nor what stands before the @ of a URL. */
export function withoutSecrets(text: string): string {
  return text
    .replaceAll(/\b(davit_)[0-9A-Za-z]{20,}|\b(whsec_)[0-9A-Za-z+/]{20,}=*/g, '$1$2…')
    .replaceAll(/:\/\/[^\s/@]+@/g, '://…@');
}

function lowerFirst(text: string): string {
  return text.charAt(0).toLowerCase() + text.slice(1);
}

function pathOf(command: Command): string {
  return command.parent === null ? command.name() : `${pathOf(command.parent)} ${command.name()}`;
}
