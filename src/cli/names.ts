import { type Command, InvalidArgumentError } from 'commander';
import { type Deployment, type Key, type ProjectId, parseRef, type Ref, type Webhook } from '../domain.ts';
import { AppError } from '../errors.ts';
import { printable } from '../printable.ts';
import type { WebhookBacklog } from '../store/backlog.ts';
import type { ProjectDetails } from '../store/projects.ts';
import type { Reads, Store } from '../store/store.ts';
import { type CommandContext, misused } from './command.ts';
import { nearest } from './suggest.ts';

/** What `command.argument` takes. */
export const PROJECT_ARGUMENT = ['<project>', 'its id, or a name that only one project has'] as const;
export const DEPLOYMENT_ARGUMENT = ['<deployment>', 'its id'] as const;
export const WEBHOOK_ARGUMENT = ['<webhook>', 'its id, or a URL that only one webhook has'] as const;
export const KEY_ARGUMENT = ['<key>', 'its id, or a name that only one key has'] as const;

/** The parser of an argument that is a ref. Throws InvalidArgumentError. */
export function refOf(text: string): Ref {
  const result = parseRef(text);
  if (!result.ok) throw new InvalidArgumentError(`It ${result.reason}.`);
  return result.ref;
}

const NAME_MAX_LENGTH = 100;

/** A project in messages: its name and id. */
export function nameOfProject({ name, id }: Pick<ProjectDetails, 'name' | 'id'>): string {
  return `project ${printable(name)} (${id})`;
}

/** A key in messages: its name and id. */
export function nameOfKey({ name, id }: Pick<Key, 'name' | 'id'>): string {
  return `key ${printable(name)} (${id})`;
}

/** A webhook in messages: its id and URL. */
export function nameOfWebhook({ id, url }: Pick<Webhook, 'id' | 'url'>): string {
  return `webhook ${id} (${printable(url)})`;
}

/** The names of all projects by id. */
export function projectNames({ projects }: Reads): Map<ProjectId, string> {
  return new Map(projects.list().map(({ id, name }) => [id, name]));
}

/**
 * Returns the name of a key or a project. One that could hardly be typed, or looks like an id or an option, is misuse.
 */
export function checkName(command: Command, name: string): string {
  const problem = nameProblem(name);
  return problem === undefined ? name : misused(command, `the name ${problem}`);
}

function nameProblem(name: string): string | undefined {
  if (name === '') return 'must not be empty';
  if ([...name].length > NAME_MAX_LENGTH) return `must be at most ${NAME_MAX_LENGTH} characters`;
  if (name.trim() !== name) return 'must not begin or end with white space';
  if (name.startsWith('-')) return 'must not begin with -';
  if (printable(name) !== name) return 'must not contain control or invisible characters';
  if (/^(?:prj|key)_/.test(name)) return 'must not look like an id';
  return undefined;
}

/** Says of a name that was just given that it means nothing alone. */
export function warnOfNamesakes(
  namesakes: number,
  nouns: 'projects' | 'keys',
  { terminal }: CommandContext,
): void {
  if (namesakes > 1) terminal.note(`warning: ${namesakes} ${nouns} have this name now: use their ids`);
}

/** By id, or by a name that only one project has. Throws AppError `not_found` or `conflict` with what to do. */
export function resolveProject(store: Store, idOrName: string): ProjectDetails {
  return resolved('project', idOrName, store.reads.projects);
}

/** By id, or by a name that only one key has. Throws AppError `not_found` or `conflict` with what to do. */
export function resolveKey(store: Store, idOrName: string, nowMs: number): Key {
  const { keys } = store.reads;
  return resolved('key', idOrName, { ...keys, resolve: (name) => keys.resolve(name, nowMs) });
}

/** By id. Throws AppError `not_found` with what to do. */
export function resolveDeployment(store: Store, id: string): Deployment {
  const deployment = store.reads.deployments.get(id);
  if (deployment !== undefined) return deployment;
  const project = store.reads.projects.find(id);
  const advice =
    project === undefined
      ? "'davit admin deployment list' shows the latest"
      : `that is a project, whose deployments 'davit admin deployment list --project ${project.id}' shows`;
  throw new AppError('not_found', `there is no deployment '${id}': ${advice}`);
}

/** By id, or by a URL that only one webhook has. Throws AppError `not_found` or `conflict` with what to do. */
export function resolveWebhook(store: Store, idOrUrl: string, nowMs: number): WebhookBacklog {
  const webhook = store.reads.backlog.webhook(idOrUrl, nowMs);
  if (webhook !== undefined) return webhook;
  const list = "'davit admin webhook list' shows all";
  // Normalised as at registration, so that the URL is also found in the form in which it was given there.
  const wanted = URL.parse(idOrUrl)?.href ?? idOrUrl;
  const [found, another] = store.reads.backlog.webhooks(nowMs).filter(({ url }) => url === wanted);
  if (another !== undefined) {
    throw new AppError('conflict', `several webhooks have this URL: use the id; ${list}`);
  }
  if (found === undefined) {
    throw new AppError('not_found', `there is no webhook '${idOrUrl}': ${list}`);
  }
  return found;
}

interface Nouns<Item> {
  resolve(idOrName: string): Item;
  list(): { name: string }[];
}

/** Adds to an error of the store the name, and the one that was probably meant. */
function resolved<Item>(noun: 'project' | 'key', idOrName: string, nouns: Nouns<Item>): Item {
  try {
    return nouns.resolve(idOrName);
  } catch (error) {
    if (!(error instanceof AppError)) throw error;
    const shown = `'${idOrName}'`;
    const list = `'davit admin ${noun} list' shows all`;
    if (error.code === 'conflict') {
      throw new AppError('conflict', `several ${noun}s are named ${shown}: use the id; ${list}`);
    }
    const meant = nearest(
      idOrName,
      nouns.list().map(({ name }) => name),
    );
    const question = meant === undefined ? '' : ` did you mean '${meant}'?`;
    throw new AppError('not_found', `there is no ${noun} ${shown}:${question} ${list}`);
  }
}
