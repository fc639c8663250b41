import { Argument, type Command } from 'commander';
import { type CommandContext, explain } from './command.ts';
import { completionText, SHELLS, type Shell } from './complete.ts';
import { SCRIPTS } from './completion-scripts.ts';

/** `davit completion`. */
export function defineCompletion(command: Command, { terminal }: CommandContext): void {
  explain(
    command,
    'Prints a script by which a shell completes commands, options and their values, and the names of projects, keys, ' +
      'webhooks and deployments in the file of --db or DAVIT_DB. The script asks davit at each tab, so it stays true ' +
      'when davit is replaced by a newer one.\n\n' +
      'bash: put the first of the lines below into ~/.bashrc, or the script into /etc/bash_completion.d/.\n' +
      'zsh: put the second into ~/.zshrc, behind compinit, or the script as _davit into a directory of fpath.\n' +
      'fish: run the third, once.',
    [
      'source <(davit completion bash)',
      'source <(davit completion zsh)',
      'davit completion fish > ~/.config/fish/completions/davit.fish',
    ],
  )
    .addArgument(new Argument('<shell>', 'whose script').choices(SHELLS))
    .action((shell: Shell) => terminal.print(SCRIPTS[shell]));
}

/** Answers what such a script asks: the shell, and the words up to the cursor. Silent where something is wrong. */
export async function answerCompletion(
  program: Command,
  [shellName, ...words]: readonly string[],
  { terminal, environment, effects }: CommandContext,
): Promise<number> {
  const shell = SHELLS.find((known) => known === shellName);
  if (shell === undefined) return 2;
  const { namesIn, pathMeant } = await import('./complete-names.ts');
  const presetPath = environment['DAVIT_DB'] ?? './davit.db';
  const text = await completionText(shell, program, words, async (noun, start, typedPath) => {
    try {
      const dbPath = typedPath === null ? presetPath : pathMeant(typedPath, environment['HOME']);
      return await namesIn(dbPath, noun, start, effects);
    } catch {
      // Whoever is typing has not asked for anything yet.
      return [];
    }
  });
  terminal.print(text);
  return 0;
}
