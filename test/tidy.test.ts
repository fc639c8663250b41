import { readdirSync, readFileSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { transformSync } from 'esbuild';
import t from 'tap';

/*
 * Holds what a reader of src/ relies on and no compiler checks: which way imports point, where the clock is
 * read, how long a file gets.
 */

const ROOT = join(import.meta.dirname, '..');

interface Source {
  /** From src/ on: `store/writer.ts`. */
  path: string;
  text: string;
  /** Without comments and types. */
  code: string;
  /** The modules of src/ that it imports, types too. */
  imports: string[];
  packages: string[];
}

const SOURCES = readSources();

const EXPORT = /^export (?:async )?(?:function\*?|const|let|class|interface|type) (\w+)/gm;

/** What each part of src/ may import besides itself. A file directly in src/ is `base`, but for main and app. */
const MAY_IMPORT: Record<string, string[]> = {
  main: ['cli', 'app', 'http', 'deploy', 'deliver', 'metrics', 'store', 'base'],
  cli: ['app', 'http', 'deploy', 'deliver', 'metrics', 'store', 'base'],
  app: ['http', 'deploy', 'deliver', 'metrics', 'store', 'base'],
  // The wings meet in the database: none imports another.
  http: ['store', 'base'],
  deploy: ['store', 'base'],
  deliver: ['store', 'base'],
  metrics: ['store', 'base'],
  store: ['base'],
  base: [],
};

/** Who may read the command line and the environment and end the process, and why. */
const OWNS_A_PROCESS = new Map([['main.ts', 'what davit is started as']]);

t.test('there is something to read', async (t) => {
  t.ok(SOURCES.length > 5);
  t.ok(SOURCES.some(({ imports }) => imports.length > 0));
  t.ok(SOURCES.some(({ packages }) => packages.includes('better-sqlite3')));
});

t.test('imports point one way', async (t) => {
  const wrong = SOURCES.flatMap(({ path, imports }) =>
    imports
      .filter((imported) => partOf(imported) !== partOf(path))
      .filter((imported) => !MAY_IMPORT[partOf(path)]?.includes(partOf(imported)))
      .map((imported) => `${path} imports ${imported}`),
  );
  t.strictSame(wrong, []);
});

t.test('every part of src/ is known', async (t) => {
  t.strictSame(
    SOURCES.map(({ path }) => partOf(path)).filter((part) => MAY_IMPORT[part] === undefined),
    [],
  );
});

t.test('domain.ts imports nothing', async (t) => {
  const domain = SOURCES.find(({ path }) => path === 'domain.ts');
  t.strictSame([domain?.imports, domain?.packages], [[], []]);
});

t.test('imports make no cycle', async (t) => {
  t.strictSame(findCircle(), []);
});

t.test('only store/ knows SQLite', async (t) => {
  const wrong = SOURCES.filter(
    ({ path, packages }) => packages.includes('better-sqlite3') && partOf(path) !== 'store',
  );
  t.strictSame(pathsOf(wrong), []);
});

t.test('no plan of a statement depends on its parameters: see database.ts', async (t) => {
  const plain = /\b(?:WHERE|AND|OR|ON)\b[^\n]*(?:[=<>]|BETWEEN|LIKE) (?::[a-zA-Z]\w*|\?)(?!\w)/;
  const wrong = SOURCES.filter(({ path }) => partOf(path) === 'store').flatMap(({ path, text }) =>
    text
      .split('\n')
      .filter((line) => !/^\s*(?:\*|\/)/.test(line) && plain.test(line))
      .map((line) => `${path}: ${line.trim()}`),
  );
  t.strictSame(wrong, []);
});

t.test('only effects.ts reads a clock, draws random numbers and sets timers', async (t) => {
  const forbidden = [
    /\bDate\.now\b/,
    /\bnew Date\(\s*\)/,
    /\bDate\(\)/,
    /\bMath\.random\b/,
    /\b(?:setTimeout|setInterval)\b/,
    /\bperformance\.(?:now|timeOrigin)\b/,
    /\bhrtime\b/,
    /\bAbortSignal\.timeout\b/,
    /\b(?:randomUUID|randomInt|getRandomValues)\b/,
    /\brandomBytes\b[^}]*\} from "node:crypto"/,
    /\bcrypto\.randomBytes\b/,
  ];
  t.strictSame(occurrences(forbidden, new Set(['effects.ts'])), []);
});

t.test('only main.ts reads arguments and environment and ends the process', async (t) => {
  const forbidden = [
    /\bprocess\.(?:argv|env|exit)\b/,
    /\{[^}]*\b(?:argv|env|exit)\b[^}]*\} from "node:process"/,
  ];
  t.strictSame(occurrences(forbidden, new Set(OWNS_A_PROCESS.keys())), []);
});

t.test('no file is longer than 500 lines', async (t) => {
  t.strictSame(pathsOf(SOURCES.filter(({ text }) => text.split('\n').length > 501)), []);
});

t.test('every exported function has a comment', async (t) => {
  t.strictSame(SOURCES.flatMap(functionsWithoutComment), []);
});

t.test('what is exported is named in another file', async (t) => {
  const wordsOf = (path: string) => new Set(readFileSync(join(ROOT, path), 'utf8').match(/\w+/g));
  const words = new Map(
    repositoryFiles(ROOT)
      .filter((path) => path.endsWith('.ts'))
      .map((path) => [path, wordsOf(path)] as const),
  );
  const unused = SOURCES.flatMap(({ path, text }) => {
    const others = [...words].filter(([other]) => other !== join('src', path)).map(([, found]) => found);
    return [...text.matchAll(EXPORT)]
      .filter(([, name = '']) => !others.some((found) => found.has(name)))
      .map(([, name]) => `${path}: ${name}`);
  });
  t.strictSame(unused, []);
});

t.test('no check is switched off, and nothing is any', async (t) => {
  const switchedOff = /biome-ignore|@ts-ignore|@ts-expect-error|@ts-nocheck|\bas any\b/;
  t.strictSame(pathsOf(SOURCES.filter(({ text }) => switchedOff.test(text))), []);
  t.match(JSON.parse(readFileSync(join(ROOT, 'biome.json'), 'utf8')).linter.rules, {
    suspicious: { noExplicitAny: 'error' },
    style: { noNonNullAssertion: 'error' },
  });
});

t.test('no file only re-exports, and none is named utils, helpers, common, misc or index', async (t) => {
  t.strictSame(
    pathsOf(SOURCES.filter(({ text }) => /^export (?:\*|\{[^}]*\}|type \{[^}]*\}) from/m.test(text))),
    [],
  );
  t.strictSame(
    pathsOf(SOURCES.filter(({ path }) => /\b(?:utils?|helpers?|common|misc|index)\b/.test(path))),
    [],
  );
});

t.test('no file names a package registry or a place on the machine where it was written', async (t) => {
  const names = [/registry\.(?:npmjs|yarnpkg)\b/, /(?<![\w.-])\/work\/\w/, /"resolved":/];
  const wrong = repositoryFiles(ROOT)
    .filter((path) => path !== 'test/tidy.test.ts')
    .filter((path) => names.some((name) => name.test(readFileSync(join(ROOT, path), 'utf8'))));
  t.strictSame(wrong, []);
});

function readSources(): Source[] {
  const folder = join(ROOT, 'src');
  return readdirSync(folder, { recursive: true, encoding: 'utf8' })
    .filter((path) => path.endsWith('.ts'))
    .sort()
    .map((path) => {
      const text = readFileSync(join(folder, path), 'utf8');
      const { code } = transformSync(text, { loader: 'ts', legalComments: 'none', target: 'node24' });
      const specifiers = [
        ...text.matchAll(/^(?:import|export)\b(?:[^'";]*?\bfrom)? '([^']+)'|\bimport\('([^']+)'\)/gm),
      ].map((match) => match[1] ?? match[2] ?? '');
      const imports = specifiers
        .filter((specifier) => specifier.startsWith('.'))
        .map((specifier) => relative(folder, join(folder, dirname(path), specifier)))
        .filter((imported) => imported !== '../package.json');
      return {
        path,
        text,
        code,
        imports,
        packages: specifiers.filter((specifier) => !specifier.startsWith('.')),
      };
    });
}

function partOf(path: string): string {
  if (path.includes('/')) return path.slice(0, path.indexOf('/'));
  return path === 'main.ts' || path === 'app.ts' ? path.slice(0, -'.ts'.length) : 'base';
}

/** The first cycle found, from one file to the same file; empty when there is none. */
function findCircle(): string[] {
  const importsOf = new Map(SOURCES.map(({ path, imports }) => [path, imports]));
  const finished = new Set<string>();
  const visit = (path: string, way: string[]): string[] => {
    if (way.includes(path)) return [...way.slice(way.indexOf(path)), path];
    if (finished.has(path)) return [];
    for (const imported of importsOf.get(path) ?? []) {
      const circle = visit(imported, [...way, path]);
      if (circle.length > 0) return circle;
    }
    finished.add(path);
    return [];
  };
  for (const { path } of SOURCES) {
    const circle = visit(path, []);
    if (circle.length > 0) return circle;
  }
  return [];
}

function occurrences(patterns: RegExp[], except: Set<string>): string[] {
  return SOURCES.filter(({ path }) => !except.has(path)).flatMap(({ path, code }) =>
    patterns.flatMap((pattern) => {
      const found = pattern.exec(code)?.[0];
      return found === undefined ? [] : [`${path}: ${found}`];
    }),
  );
}

function functionsWithoutComment({ path, text }: Source): string[] {
  const lines = text.split('\n');
  return lines.flatMap((line, index) => {
    const name = /^export (?:async )?function\*? (\w+)/.exec(line)?.[1];
    const above = lines[index - 1] ?? '';
    if (name === undefined || above.endsWith('*/') || above.startsWith('//')) return [];
    // The second signature of an overloaded function.
    return above.startsWith(`export function ${name}`) ? [] : [`${path}: ${name}`];
  });
}

function pathsOf(sources: Source[]): string[] {
  return sources.map(({ path }) => path);
}

function repositoryFiles(folder: string): string[] {
  const notOurs = new Set(['node_modules', 'build', '.git', '.tap']);
  return readdirSync(folder, { withFileTypes: true })
    .filter(({ name }) => !notOurs.has(name) && !name.includes('.db'))
    .flatMap((entry) => {
      const path = join(folder, entry.name);
      if (entry.isDirectory()) return repositoryFiles(path);
      return entry.isFile() ? [relative(ROOT, path)] : [];
    });
}
