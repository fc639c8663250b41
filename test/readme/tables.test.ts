import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { EVENT_TYPES } from '../../src/domain.ts';
import type { OpenApiDocument } from '../../src/http/openapi-types.ts';
import { place, run } from '../helpers/cli.ts';
import { codesIn, readmeSection, tableRows } from '../helpers/readme.ts';
import { serve } from '../helpers/served.ts';

/* What the README lists is what there is: no option, endpoint or file too few, none too many. */

const SOURCES = join(import.meta.dirname, '../../src');

const { url } = await serve(t, place(t).directory);
const { paths } = (await (await fetch(`${url}/v2/openapi.json`)).json()) as OpenApiDocument;

interface CommandOption {
  /** `deploy`, `project create`: as the README names them, `admin` left out. */
  command: string;
  flags: string;
  /** Empty: none. */
  defaultText: string;
  variable: string;
  /** What it is for. */
  text: string;
}

/** A row of the README's option tables. */
interface OptionRow extends Omit<CommandOption, 'command'> {
  /** `any`: every command that no other row with these flags names. */
  commands: string[] | 'any';
  /** Of `any but …`. */
  but: string[];
}

t.test('every option is in the README with its default and its variable', async (t) => {
  const options = await optionsBelow([]);
  const rows = optionRows();
  t.ok(options.length > 50 && rows.length > 50, 'there is something to compare');
  const rowOf = ({ command, flags }: CommandOption) => {
    const ofThese = rows.filter((row) => row.flags === flags);
    return (
      ofThese.find(({ commands }) => commands.includes(command) && commands !== 'any') ??
      ofThese.find(({ commands }) => commands === 'any')
    );
  };
  t.strictSame(
    options
      .filter((option) => rowOf(option) === undefined)
      .map(({ command, flags }) => `${command}: ${flags}`),
    [],
    'options that the README lacks',
  );
  t.strictSame(
    rows.filter(
      (row) =>
        row.commands !== 'any' &&
        !row.commands.every((command) =>
          options.some((option) => option.command === command && option.flags === row.flags),
        ),
    ),
    [],
    'options that only the README has',
  );
  t.strictSame(
    rows.filter((row) => !options.some((option) => rowOf(option) === row)),
    [],
    'rows that stand for nothing',
  );
  const all = [...new Set(options.map(({ command }) => command))];
  for (const { flags, but } of rows.filter(({ commands }) => commands === 'any')) {
    const having = new Set(options.filter((option) => option.flags === flags).map(({ command }) => command));
    const without = all.filter((command) => !having.has(command));
    t.strictSame(without.toSorted(), but.toSorted(), `commands without ${flags}`);
  }
  for (const row of rows) {
    const meant = options.filter((option) => rowOf(option) === row);
    const defaults = new Set(meant.map(({ defaultText }) => defaultText).filter((text) => text !== ''));
    t.strictSame([...defaults], row.defaultText === '' ? [] : [row.defaultText], `${row.flags}: its default`);
    t.strictSame([...new Set(meant.map(({ variable }) => variable))], [row.variable], row.flags);
    const { text } = (row.text === AS_FOR_SERVE ? rows.find(isOfServe(row)) : undefined) ?? row;
    t.strictSame(
      meant.filter((option) => !text.startsWith(option.text)).map(({ command, text }) => [command, text]),
      [],
      `${row.flags}: what it is for, as --help says it; more may follow: ${text}`,
    );
  }
});

t.test('the README names every event type and query parameter', async (t) => {
  const parameters = Object.values(paths).flatMap(({ get }) => get?.parameters ?? []);
  const names = new Set(parameters.filter((one) => one.in === 'query').map(({ name }) => name));
  t.ok(names.size > 8);
  const api = readmeSection('## The API');
  t.strictSame(
    [...names].filter((name) => !new RegExp(`[\`?&]${name}=`).test(api)),
    [],
    'query parameters that the README lacks',
  );
  const webhooks = readmeSection('## Webhooks');
  t.strictSame(
    EVENT_TYPES.filter((type) => !webhooks.includes(`\`${type}\``)),
    [],
    'events that the README lacks',
  );
});

t.test('every endpoint is in the README with its scope', async (t) => {
  const described = Object.entries(paths).flatMap(([path, item]) =>
    Object.entries(item).flatMap(([method, operation]) => {
      const [requirement] = operation.security ?? [];
      return requirement === undefined
        ? []
        : [`${method.toUpperCase()} ${path}: ${requirement['key']?.join()}`];
    }),
  );
  const listed = tableRows(readmeSection('## The API'))
    .filter(([endpoint = '']) => /^`[A-Z]+ \//.test(endpoint))
    .map(([endpoint = '', scope = '']) => `${codesIn(endpoint).join()}: ${codesIn(scope).join()}`);
  t.ok(described.length > 15);
  t.strictSame(listed.toSorted(), described.toSorted());
});

t.test('every file of src/ is on the map in the README', async (t) => {
  const map = readmeSection('### A map');
  const names = [...map.matchAll(/[\w*-]+\.(?:ts|css)\b/g)].map(([name]) => name);
  const isOnMap = (file: string) =>
    names.some((name) => new RegExp(`^${name.replaceAll('*', '[\\w-]*').replace('.', '\\.')}$`).test(file));
  const files = sourcePaths()
    // One for each command, and what these share: commands.ts is their table of contents.
    .filter((path) => !path.startsWith('cli/'));
  t.strictSame(
    files.filter((path) => !isOnMap(path.slice(path.lastIndexOf('/') + 1))),
    [],
    'files that the map lacks',
  );
  t.strictSame(
    names.filter((name) => !name.includes('*') && !sourcePaths().some((path) => path.endsWith(name))),
    [],
    'files that only the map has',
  );
});

t.test('every message by which the README says to recognise a fault is one of davit', async (t) => {
  const rows = tableRows(readmeSection('#### When something is wrong'));
  // A message is several words; a status and a reason are one.
  const messages = rows.flatMap(([seen = '']) => codesIn(seen)).filter((code) => code.includes(' '));
  t.ok(messages.length >= 3);
  const sources = sourcePaths().map((path) => readFileSync(join(SOURCES, path), 'utf8'));
  t.strictSame(
    messages.filter((message) => {
      const beginning = message.replace(/ …$/, '');
      return !sources.some((text) => ["'", '`'].some((quote) => text.includes(`${quote}${beginning}`)));
    }),
    [],
    'messages that davit does not have',
  );
});

function sourcePaths(): string[] {
  return readdirSync(SOURCES, { recursive: true, encoding: 'utf8' }).filter((path) => path.endsWith('.ts'));
}

/** What `--help` says of the options of this command and of those below it. */
async function optionsBelow(path: string[]): Promise<CommandOption[]> {
  const { stdout } = await run([...path, '--help']);
  const commands = [...sectionOf(stdout, 'Commands').matchAll(/^ {2}([a-z][\w-]*)/gm)]
    .map(([, name]) => name ?? '')
    .filter((name) => name !== 'help');
  if (commands.length > 0)
    return (await Promise.all(commands.map((name) => optionsBelow([...path, name])))).flat();
  const command = path.filter((word) => word !== 'admin').join(' ');
  return ['Options', 'Global Options']
    .flatMap((title) => `\n${sectionOf(stdout, title)}`.split(/\n {2}(?=-)/).slice(1))
    .map((text) => ({ command, ...optionOf(text) }))
    .filter(({ flags }) => flags !== '-h, --help');
}

/** The indented lines below `Options:` and the like; empty where it has none. */
function sectionOf(help: string, title: string): string {
  return new RegExp(`^${title}:\\n((?: .*\\n)+)`, 'm').exec(help)?.[1] ?? '';
}

/** `--limit <n>  show at most this many (default 20, $DAVIT_LIMIT)`, over several lines where it is long. */
function optionOf(help: string): Omit<CommandOption, 'command'> {
  const [, flags = '', description = ''] = /^(.*?\S) {2,}(.*)$/s.exec(help) ?? [];
  const [, text = '', defaultText = '', variable = ''] =
    /^(.*?) \((?:such as [^,]*, )?(?:default (.*?), )?\$(\w+)\)$/.exec(
      description.replaceAll(/\s+/g, ' ').trim(),
    ) ?? [];
  return { flags, defaultText, variable, text: text.replaceAll('$', '') };
}

function optionRows(): OptionRow[] {
  const ofOne = (command: string) =>
    tableRows(readmeSection(`### \`davit ${command}\``)).map((cells) =>
      optionRow([`\`${command}\``, ...cells]),
    );
  return [
    ...ofOne('serve'),
    ...ofOne('deploy'),
    ...tableRows(readmeSection('### The other commands')).map(optionRow),
  ];
}

function optionRow([
  commands = '',
  flags = '',
  defaultText = '',
  variable = '',
  text = '',
]: string[]): OptionRow {
  return {
    ...(commands.startsWith('any')
      ? { commands: 'any', but: codesIn(commands) }
      : { commands: codesIn(commands), but: [] }),
    flags: codesIn(flags).join(),
    defaultText: codesIn(defaultText).join(),
    variable: codesIn(variable).join(),
    text: text.replaceAll('`', ''),
  };
}

/** What a row says of an option that another command has from `serve`. */
const AS_FOR_SERVE = 'as for serve';

function isOfServe({ flags }: OptionRow): (row: OptionRow) => boolean {
  return (row) => row.flags === flags && row.commands.includes('serve');
}
