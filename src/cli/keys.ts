import type { Command } from 'commander';
import { type Key, type ProjectId, SCOPES } from '../domain.ts';
import { formatDuration } from '../durations.ts';
import { appending, durationMsOf, durationMsOrNone, option, repeated } from '../options.ts';
import type { OutgoingSecret } from '../store/keys.ts';
import type { Store } from '../store/store.ts';
import { type CommandContext, explain, jsonOption, misused, requiredOption } from './command.ts';
import { type ConfirmedOptions, confirm } from './confirm.ts';
import { withStore } from './database-file.ts';
import { chosenOf } from './lists.ts';
import { exactMoment, exactMomentOf, moment } from './moments.ts';
import {
  checkName,
  KEY_ARGUMENT,
  nameOfKey,
  projectNames,
  resolveKey,
  resolveProject,
  warnOfNamesakes,
} from './names.ts';
import { printJson, printMade, printTable } from './results.ts';
import { shortList, shortName } from './shorten.ts';
import { fields } from './table.ts';

/** `davit admin key`. */
export function defineKeys(command: Command, context: CommandContext): void {
  explain(command, 'The keys with which the API is called. Each is limited to some scopes and projects.', [
    'davit admin key create --name ci --scope deployments:write --project website',
    'davit admin key list',
  ]);
  defineCreate(command.command('create'), context);
  defineList(command.command('list'), context);
  defineShow(command.command('show'), context);
  defineRotate(command.command('rotate'), context);
  defineRevoke(command.command('revoke'), context);
}

interface CreateOptions {
  name: string;
  scope?: string[];
  allScopes?: boolean;
  project?: string[];
  allProjects?: boolean;
  expiresIn?: number;
  json?: boolean;
}

function defineCreate(command: Command, context: CommandContext): void {
  explain(
    command.summary('create a key; its secret is shown once'),
    'Creates a key and prints its secret, which is shown only this once. There is no default for what a key may do and ' +
      `see: give --scope or --all-scopes, and --project or --all-projects.\n\nScopes: ${SCOPES.join(', ')}`,
    [
      'davit admin key create --name ci --scope deployments:write --project website',
      'davit admin key create --name tv --scope projects:read --all-projects',
      'KEY=$(davit admin key create --name ops --all-scopes --all-projects)',
    ],
  )
    .addOption(requiredOption('--name <name>', 'its name'))
    .addOption(
      option('--scope <scope...>', 'what the key may do; may be repeated')
        .choices(SCOPES)
        .argParser(appending(String)),
    )
    .addOption(option('--all-scopes', 'the key may do everything'))
    .addOption(
      option(
        '--project <project...>',
        'a project that the key sees, by id or name; may be repeated',
      ).argParser(repeated),
    )
    .addOption(option('--all-projects', 'the key sees all projects, later ones too'))
    .addOption(
      option('--expires-in <duration>', 'the key expires after this time; by default never').argParser(
        durationMsOf,
      ),
    )
    .addOption(jsonOption())
    .action((options: CreateOptions) => createKey(command, options, context));
}

async function createKey(command: Command, options: CreateOptions, context: CommandContext): Promise<void> {
  const name = checkName(command, options.name);
  const scopeNames = chosen(command, options.scope, options.allScopes, ['scope', 'what the key may do']);
  const scopes = scopeNames === 'all' ? [...SCOPES] : chosenOf(command, 'scope', scopeNames, SCOPES);
  const projects = chosen(command, options.project, options.allProjects, ['project', 'what the key sees']);
  const { key, secret, namesakes } = await withStore(
    command,
    context,
    projects === 'all' ? 'create' : 'refuse',
    async (store) => {
      // Before it is made: nothing may fail between that and showing its secret.
      const named = store.reads.keys.list().filter((other) => other.name === name);
      const living = named.filter((other) => stateOf(other, context) === 'live').length;
      const made = await store.writer.write('keys.create', {
        name,
        scopes,
        allProjects: projects === 'all',
        projectIds: projects === 'all' ? [] : projects.map((project) => resolveProject(store, project).id),
        expiresInMs: options.expiresIn ?? null,
      });
      return { ...made, namesakes: living + 1 };
    },
  );
  printSecret(context, options, { ...key, secret }, `created ${nameOfKey(key)}`);
  warnOfNamesakes(namesakes, 'keys', context);
}

/**
 * The value of `--x` or of `--all-xs`, exactly one of which must be given. The command line takes precedence over
 * variables.
 */
function chosen(
  command: Command,
  some: string[] | undefined,
  all: boolean | undefined,
  [name, purpose]: readonly [name: 'scope' | 'project', purpose: string],
): string[] | 'all' {
  const allName = name === 'scope' ? 'allScopes' : 'allProjects';
  const isTyped = (candidate: string) => command.getOptionValueSource(candidate) === 'cli';
  const counts = (candidate: string) => isTyped(candidate) || !(isTyped(name) || isTyped(allName));
  const named = counts(name) ? some : undefined;
  const everything = counts(allName) && all === true;
  if (named !== undefined && everything) {
    misused(command, `--${name} and --all-${name}s exclude each other: give one of them`);
  }
  if (everything) return 'all';
  return (
    named ?? misused(command, `say ${purpose}: --${name} <${name}>, which may be repeated, or --all-${name}s`)
  );
}

function printSecret(
  context: CommandContext,
  options: { json?: boolean },
  key: Key & { secret: string },
  done: string,
): void {
  const text = `${done}; this is its secret, which is shown only once: save it now`;
  printMade(context, options, key, text, key.secret);
}

function defineList(command: Command, context: CommandContext): void {
  explain(
    command.summary('all keys, revoked ones too'),
    'Lists all keys, oldest first. Never shows a secret, only its last four characters.',
    ['davit admin key list', 'davit admin key list --json'],
  )
    .addOption(jsonOption())
    .action((options: { json?: boolean }) =>
      withStore(command, context, 'refuse', (store) => {
        const keys = store.reads.keys.list();
        if (options.json === true) return printJson(context, keys);
        printKeys(keys, store, context);
      }),
    );
}

function printKeys(keys: readonly Key[], store: Store, context: CommandContext): void {
  const names = projectNames(store.reads);
  printTable(
    context,
    keys,
    "there are no keys yet: 'davit admin key create --help' tells how to create one",
    [
      { title: 'ID', of: ({ id }) => id },
      { title: 'NAME', of: ({ name }) => name, shorten: shortName },
      { title: 'SECRET', of: ({ last4 }) => `…${last4}` },
      { title: 'STATE', of: (key) => stateAndEndOf(key, context) },
      { title: 'USED', of: ({ last_used_at }) => moment(context, last_used_at) || 'never' },
      { title: 'PROJECTS', of: (key) => projectsText(key, names), shorten: shortList(', ') },
      { title: 'SCOPES', of: scopesText, shorten: shortList(' ') },
    ],
  );
}

function stateOf(key: Key, { effects }: CommandContext): string {
  if (key.revoked_at !== null) return 'revoked';
  return key.expires_at !== null && Date.parse(key.expires_at) <= effects.now() ? 'expired' : 'live';
}

/** `90d left` on a terminal, where another table column would not fit into 80 characters. */
function stateAndEndOf(key: Key, context: CommandContext): string {
  const state = stateOf(key, context);
  if (state !== 'live' || key.expires_at === null) return state;
  const end = moment(context, key.expires_at);
  return end.startsWith('in ') ? `${end.slice('in '.length)} left` : `live until ${end}`;
}

function scopesText({ scopes }: Key): string {
  return scopes.length === SCOPES.length ? 'all' : scopes.join(' ');
}

function projectsText(key: Key, names: ReadonlyMap<ProjectId, string>): string {
  return key.all_projects ? 'all' : key.project_ids.map((id) => names.get(id) ?? id).join(', ');
}

function defineShow(command: Command, context: CommandContext): void {
  explain(command.summary('one key'), 'Shows one key: what it may do and see, since when, and until when.', [
    'davit admin key show ci',
  ])
    .argument(...KEY_ARGUMENT)
    .addOption(jsonOption())
    .action((text: string, options: { json?: boolean }) =>
      withStore(command, context, 'refuse', (store) => {
        const nowMs = context.effects.now();
        const key = resolveKey(store, text, nowMs);
        const old = store.reads.keys.outgoingSecrets(key.id, nowMs);
        if (options.json === true) return printJson(context, { ...key, old_secrets: old });
        context.terminal.print(keyText(key, old, store, context));
      }),
    );
}

function keyText(key: Key, old: readonly OutgoingSecret[], store: Store, context: CommandContext): string {
  const at = exactMomentOf(context);
  const names = projectNames(store.reads);
  return fields(context.terminal, [
    ['id', key.id],
    ['name', key.name],
    ['state', stateOf(key, context)],
    ['secret', `…${key.last4}`],
    ...old.map(
      ({ last4, expires_at }) =>
        ['old secret', `…${last4}, until ${exactMoment(context, expires_at)}`] as const,
    ),
    ['scopes', key.scopes.join(' ')],
    [
      'projects',
      key.all_projects
        ? 'all, later ones too'
        : key.project_ids.map((id) => `${names.get(id) ?? ''} (${id})`).join(', '),
    ],
    ['created', at(key.created_at)],
    ['rotated', at(key.rotated_at)],
    ['last used', at(key.last_used_at) ?? 'never'],
    ['expires', at(key.expires_at) ?? 'never'],
    ['revoked', at(key.revoked_at)],
  ]);
}

interface RotateOptions {
  overlap: number;
  json?: boolean;
}

function defineRotate(command: Command, context: CommandContext): void {
  explain(
    command.summary('give a key a new secret'),
    'Gives a key a new secret and prints it, only this once. The key keeps its id, scopes, projects and webhooks, and its ' +
      'Idempotency-Keys are still remembered. The old secret ends at once, or after --overlap.',
    ['davit admin key rotate ci', 'davit admin key rotate ci --overlap 24h'],
  )
    .argument(...KEY_ARGUMENT)
    .addOption(
      option('--overlap <duration>', 'how long the old secret stays valid')
        .argParser(durationMsOrNone)
        .default(0),
    )
    .addOption(jsonOption())
    .action((text: string, options: RotateOptions) => rotateKey(command, text, options, context));
}

async function rotateKey(
  command: Command,
  text: string,
  options: RotateOptions,
  context: CommandContext,
): Promise<void> {
  const { key, secret } = await withStore(command, context, 'refuse', (store) =>
    store.writer.write('keys.rotate', {
      id: resolveKey(store, text, context.effects.now()).id,
      overlapMs: options.overlap,
    }),
  );
  const oldEndsMs = context.effects.now() + options.overlap;
  const ends =
    key.expires_at !== null && Date.parse(key.expires_at) <= oldEndsMs
      ? `with the key, at ${key.expires_at}`
      : `in ${formatDuration(options.overlap)}`;
  const old = options.overlap === 0 ? 'ended' : `ends ${ends}`;
  printSecret(context, options, { ...key, secret }, `${nameOfKey(key)} has a new secret; the old one ${old}`);
}

function defineRevoke(command: Command, context: CommandContext): void {
  explain(
    command.summary('revoke a key for ever'),
    'Revokes a key from the next request on, and disables the webhooks that it registered. This cannot be undone. ' +
      'Deployments that it queued still start: to prevent that, pause their project, then cancel them.',
    ['davit admin key revoke ci', 'davit admin key revoke key_… --yes'],
  )
    .argument(...KEY_ARGUMENT)
    .addOption(option('--yes', 'do not ask for confirmation'))
    .addOption(jsonOption())
    .action((text: string, options: ConfirmedOptions) => revokeKey(command, text, options, context));
}

async function revokeKey(
  command: Command,
  text: string,
  options: ConfirmedOptions,
  context: CommandContext,
): Promise<void> {
  const before = await withStore(command, context, 'refuse', (store) =>
    resolveKey(store, text, context.effects.now()),
  );
  if (before.revoked_at === null) {
    const consequence = 'This also disables its webhooks, and cannot be undone.';
    await confirm(command, `${consequence}\nRevoke ${nameOfKey(before)}?`, options.yes, context);
  }
  const key = await withStore(command, context, 'refuse', (store) =>
    store.writer.write('keys.revoke', { id: before.id }),
  );
  if (options.json === true) return printJson(context, key);
  context.terminal.print(
    `${nameOfKey(key)} ${before.revoked_at === null ? 'is revoked' : 'was revoked already'}`,
  );
}
