import { Argument, type Command } from 'commander';
import { type CommandContext, explain } from './command.ts';
import { completionText, SHELLS, type Shell } from './complete.ts';
import { SCRIPTS } from './completion-scripts.ts';

/** `davit completion`. */
export function defineCompletion(command: Command, { terminal }: CommandContext): void {
  explain(
    command,
    'Prints a script that lets a shell complete commands, options and their values, and the names of projects, keys, ' +
      'webhooks and deployments in the file of --db or DAVIT_DB. The script asks davit at each tab, so it need not be ' +
      'renewed when davit is upgraded.\n\n' +
      'bash: put the first line below into ~/.bashrc, or the script into /etc/bash_completion.d/.\n' +
      'zsh: put the second line into ~/.zshrc, after compinit, or the script as _davit into a directory of fpath.\n' +
      'fish: run the third line once.',
    [
      'source <(davit completion bash)',
      'source <(davit completion zsh)',
      'davit completion fish > ~/.config/fish/completions/davit.fish',
    ],
  )
    .addArgument(new Argument('<shell>', 'which shell').choices(SHELLS))
    .action((shell: Shell) => terminal.print(SCRIPTS[shell]));
}

/** Answers such a script, which passes the shell and the words up to the cursor. Prints no errors. */
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
      // The user is still typing: an error would only be in the way.
      return [];
    }
  });
  terminal.print(text);
  return 0;
}
