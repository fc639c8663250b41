import { readFileSync } from 'node:fs';
import { join } from 'node:path';

const README = readFileSync(join(import.meta.dirname, '../../README.md'), 'utf8');

/** The code block below `<!-- test: name -->`, as a reader would copy it. Throws unless there is exactly one. */
export function readmeBlock(name: string): string {
  const marker = `<!-- test: ${name} -->\n`;
  const blocks = README.split(marker)
    .slice(1)
    .map((rest) => /^```\w+\n(.*?)^```$/ms.exec(rest)?.[1]);
  const [block] = blocks;
  if (blocks.length !== 1 || block === undefined) throw new Error(`the README has not one block ${name}`);
  return block;
}

/** What stands below this heading, up to the next one of its level or above. Throws where there is none. */
export function readmeSection(heading: string): string {
  const [, level = ''] = /^(#+) /.exec(heading) ?? [];
  const start = README.indexOf(`\n${heading}\n`);
  if (level === '' || start === -1) throw new Error(`the README has no heading ${heading}`);
  const rest = README.slice(start + heading.length + 2);
  const end = new RegExp(`^#{1,${level.length}} `, 'm').exec(rest)?.index;
  return rest.slice(0, end);
}

/** The rows of the tables in this text, each the texts of its cells; heads and rules left out. */
export function tableRows(text: string): string[][] {
  const lines = text.split('\n');
  return lines
    .filter((line, index) => line.startsWith('| ') && !lines[index + 1]?.startsWith('|---'))
    .map((line) =>
      line
        .slice(1, line.lastIndexOf('|'))
        .split('|')
        .map((cell) => cell.trim()),
    );
}

/** What stands between backticks in a cell. */
export function codesIn(cell: string): string[] {
  return [...cell.matchAll(/`([^`]+)`/g)].map(([, code]) => code ?? '');
}
