import type { Plugin, Request } from '@hapi/hapi';
import {
  DEPLOYMENT_STATUSES,
  type Deployment,
  type DeploymentId,
  type DeploymentStatus,
  isTerminal,
  type Page,
  type ProjectId,
  type Ref,
} from '../domain.ts';
import type { Effects } from '../effects.ts';
import { wrongKey } from '../errors.ts';
import type { DeploymentFilter } from '../store/deployment-pages.ts';
import type { DeploymentProgress } from '../store/deployments.ts';
import type { Caller } from '../store/keys.ts';
import type { Reads } from '../store/store.ts';
import { inTurn } from '../turns.ts';
import type { Answers } from './answers.ts';
import { callerOf, currentCaller } from './auth.ts';
import { notFound } from './errors.ts';
import { CANCELING_DEPLOYMENT, QUEUED_DEPLOYMENT, REPORTED_DEPLOYMENT } from './examples.ts';
import {
  bodySchema,
  creationParameters,
  idSchema,
  oneOrMoreOf,
  pageParameters,
  querySchema,
  refSchema,
  wholeNumber,
} from './input-schemas.ts';
import type { Pages } from './pages.ts';
import { type ReportBody, reportBody } from './report-body.ts';
import { routeOptions } from './route-options.ts';
import { pathId } from './validation.ts';
import { closeWithResponse, type Watches } from './watches.ts';

interface DeploymentListQuery {
  limit: number;
  cursor?: string;
  status?: DeploymentStatus[];
  ref?: Ref;
  project_id?: ProjectId;
  created_after?: number;
  created_before?: number;
}

type ListRequest = Pick<Request<{ Query: DeploymentListQuery }>, 'auth' | 'query'>;

interface DeploymentRefs {
  Params: { deployment_id: string };
}

const LIST_DESCRIPTION = `
Newest first. If only few of very many deployments match the filters, or if their outputs are long, a page may have fewer
items than \`limit\`, or none, and still a \`next_cursor\` to go on with.
`.trim();

/** The pattern in words: generated clients and /docs have no other place for it. */
const REF_DESCRIPTION =
  'The branch, tag or commit to deploy: letters a-z and A-Z, digits and `. _ - / + @ = , #`, beginning with a letter, a digit or `_`. No `..` or `//`, no part between slashes that begins with `.` or ends in `.lock`, no `/` or `.` at the end, and not `HEAD`.';

const QUEUE_FULL =
  'Too many requests, or, if the project has a command and the policy `queue`, too many of its deployments are queued.';

/**
 * Creating, listing, awaiting, canceling, repeating and reporting on deployments. `maxQueued`: how many may be queued in
 * one project; null: any number.
 */
export function deployments(
  reads: Reads,
  answers: Answers,
  pages: Pages,
  watches: Watches,
  effects: Effects,
  maxQueued: number | null,
): Plugin<void> {
  const visibleProjects = reads.cache<ProjectId | null>();
  // A commit wakes all requests that wait for the end of a deployment: the first read serves all of them.
  const awaited = reads.cache<DeploymentProgress | null>();
  // Behind 100,000 that wait, to read one takes 3 ms: 500 waits that ended at once took 1.8 s.
  const shownDeployments = reads.cache<Deployment | null>();
  return {
    name: 'deployments',
    register(server) {
      server.route<{ Params: { project_id: string }; Payload: { ref: Ref } }>({
        method: 'POST',
        path: '/v2/projects/{project_id}/deployments',
        options: routeOptions({
          scope: 'deployments:write',
          input: {
            payload: bodySchema({ ref: refSchema.required().description(REF_DESCRIPTION) }).example({
              ref: 'main',
            }),
          },
          operationId: 'createDeployment',
          summary: 'Deploy a ref',
          description:
            'If the project has a command, the deployment is queued behind its earlier ones, and carried out in its turn. If it has none, another system carries it out, in an order of its own, and reports how it goes.',
          responses: {
            201: {
              description: 'The deployment, queued.',
              resource: 'Deployment',
              example: QUEUED_DEPLOYMENT,
            },
          },
          errors: {
            conflict: 'The project is archived.',
            rate_limited: QUEUE_FULL,
          },
        }),
        handler(request, h) {
          const caller = callerOf(request);
          return answers.write(request, h, 'deployments.create', {
            projectId: visibleProject(request, request.params.project_id),
            ref: request.payload.ref,
            trigger: 'api',
            keyId: caller.keyId,
            redeployOf: null,
            maxQueued,
          });
        },
      });

      server.route<{ Params: { project_id: string }; Query: DeploymentListQuery }>({
        method: 'GET',
        path: '/v2/projects/{project_id}/deployments',
        options: routeOptions({
          scope: 'deployments:read',
          input: { query: querySchema(narrowing) },
          operationId: 'listProjectDeployments',
          summary: 'List deployments of a project',
          description: LIST_DESCRIPTION,
          responses: { 200: { description: 'A page of deployments.', pageOf: 'Deployment' } },
        }),
        handler(request) {
          const { project_id } = request.params;
          const { project_id: filtered = project_id } = request.query;
          // Both are to hold, and no deployment is of two projects.
          const onlyOf = filtered === project_id ? project_id : NO_PROJECT;
          const walk = beginWalk(request, 'deployments of a project', onlyOf);
          visibleProject(request, project_id);
          return page(request, walk);
        },
      });

      server.route<{ Query: DeploymentListQuery }>({
        method: 'GET',
        path: '/v2/deployments',
        options: routeOptions({
          scope: 'deployments:read',
          input: {
            query: querySchema(narrowing),
          },
          operationId: 'listDeployments',
          summary: 'List deployments of all projects',
          description: LIST_DESCRIPTION,
          responses: { 200: { description: 'A page of deployments.', pageOf: 'Deployment' } },
        }),
        // If the key does not see `project_id`, the page is empty, as for a project that does not exist.
        handler: (request) =>
          page(request, beginWalk(request, 'deployments', request.query.project_id ?? null)),
      });

      server.route<DeploymentRefs & { Query: { wait: number } }>({
        method: 'GET',
        path: '/v2/deployments/{deployment_id}',
        options: routeOptions({
          scope: 'deployments:read',
          input: {
            query: querySchema({ wait: waitSeconds }),
          },
          operationId: 'getDeployment',
          summary: 'Get a deployment',
          description:
            'With `wait`, the answer comes once the deployment has ended, or after that many seconds at the latest.',
          responses: { 200: { description: 'The deployment.', resource: 'Deployment' } },
          errors: { rate_limited: 'Too many requests, or too many requests of this key are waiting.' },
        }),
        async handler(request) {
          const id = pathId('dpl', request.params.deployment_id);
          const waitMs = request.query.wait * 1000;
          const seen = waitMs > 0 ? await waitForEnd(request, id, waitMs) : undefined;
          const caller = callerOf(request);
          return inTurn(() => visibleDeployment(caller, id, seen), caller.keyId);
        },
      });

      server.route<DeploymentRefs>({
        method: 'POST',
        path: '/v2/deployments/{deployment_id}/cancel',
        options: routeOptions({
          scope: 'deployments:write',
          operationId: 'cancelDeployment',
          summary: 'Cancel a deployment',
          description:
            'A queued deployment is canceled at once. A running one is `canceling` until its command is gone, or until the system that carries it out reports its end, and may still succeed or fail.',
          responses: {
            202: {
              description: 'The deployment, `canceled` or `canceling`.',
              resource: 'Deployment',
              example: CANCELING_DEPLOYMENT,
            },
          },
          errors: { conflict: 'The deployment has ended already.' },
        }),
        handler(request, h) {
          const id = idOfVisible(request, request.params.deployment_id);
          return answers.write(request, h, 'deployments.cancel', id && { id });
        },
      });

      server.route<DeploymentRefs>({
        method: 'POST',
        path: '/v2/deployments/{deployment_id}/redeploy',
        options: routeOptions({
          scope: 'deployments:write',
          operationId: 'redeploy',
          summary: 'Deploy the same ref again',
          responses: {
            201: {
              description: 'A new deployment, with `redeploy_of` set.',
              resource: 'Deployment',
              example: {
                ...QUEUED_DEPLOYMENT,
                trigger: 'redeploy',
                redeploy_of: 'dpl_Vb3kVbNmQwErTyUiOpAsDfGh',
              },
            },
          },
          errors: {
            conflict: 'The project is archived.',
            rate_limited: QUEUE_FULL,
          },
        }),
        handler(request, h) {
          const id = idOfVisible(request, request.params.deployment_id);
          const { keyId } = callerOf(request);
          return answers.write(request, h, 'deployments.redeploy', id && { id, keyId, maxQueued });
        },
      });

      server.route<DeploymentRefs & { Payload: ReportBody }>({
        method: 'POST',
        path: '/v2/deployments/{deployment_id}/report',
        options: routeOptions({
          scope: 'deployments:report',
          input: { payload: reportBody },
          operationId: 'reportDeployment',
          summary: 'Report how a deployment goes',
          description:
            'For projects without a command, whose deployments another system carries out. To report the same end again changes nothing. While the deployment is `canceling`, a report of `running` is answered with the status `canceling`, and `failed` ends it as `canceled`. If it was canceled before it ran, only `failed` is accepted, and changes nothing. While its project is `paused` or `archived`, a queued deployment does not become `running`.',
          responses: {
            200: { description: 'The deployment.', resource: 'Deployment', example: REPORTED_DEPLOYMENT },
          },
          errors: {
            conflict:
              'The deployment has ended in another way, davit itself carries it out, or it would become `running` while its project is paused or archived.',
          },
        }),
        handler(request, h) {
          const id = idOfVisible(request, request.params.deployment_id);
          const { status, message: given = null, outputs = null } = request.payload;
          const message = given === '' ? null : given;
          return answers.write(request, h, 'deployments.report', id && { id, status, message, outputs });
        },
      });
    },
  };

  function visibleProject(request: Pick<Request, 'auth'>, pathText: string): ProjectId {
    const caller = callerOf(request);
    const id = visibleProjects(
      `${caller.keyId} ${pathText}`,
      () => reads.projects.visibleTo(caller, pathId('prj', pathText))?.id ?? null,
    );
    if (id === null) throw notFound();
    return id;
  }

  /** `seen`: a status that it had, perhaps after the moment that this task knows. */
  function visibleDeployment(caller: Caller, id: DeploymentId, seen?: DeploymentStatus): Deployment {
    const read = () => reads.deployments.visibleTo(caller, id) ?? null;
    const deployment = shownDeployments(`${caller.keyId} ${id} ${seen}`, read);
    if (deployment === null) throw notFound();
    return deployment;
  }

  /** Undefined if the caller does not see it, or if it does not exist (any more). */
  function idOfVisible(request: Pick<Request, 'auth'>, pathText: string): DeploymentId | undefined {
    return reads.deployments.progressVisibleTo(callerOf(request), pathId('dpl', pathText))?.id;
  }

  /** What to list, and from where. Call it before the project is looked up: wrong values come before visibility. */
  function beginWalk({ auth, query }: ListRequest, list: string, projectId: string | null) {
    const { cursor, status, ref, created_after, created_before } = query;
    const filter: DeploymentFilter = {
      projectId,
      statuses: status?.toSorted() ?? null,
      ref: ref ?? null,
      createdAfterMs: created_after ?? null,
      createdBeforeMs: created_before ?? null,
    };
    const walk = { list, filters: { ...filter }, keyId: callerOf({ auth }).keyId };
    return { filter, walk, beforeSeq: pages.position(walk, cursor, Number.MAX_SAFE_INTEGER) };
  }

  async function page(
    request: ListRequest,
    { filter, walk, beforeSeq }: ReturnType<typeof beginWalk>,
  ): Promise<Page<Deployment>> {
    const { limit } = request.query;
    return pages.page(walk, await reads.deployments.page(callerOf(request), filter, beforeSeq, limit));
  }

  /**
   * Resolves to the status of the deployment once it has ended, after `waitMs`, or when the client disconnects or the
   * service stops. Throws `not_found`, and `unauthorized` if the key is no longer valid by then.
   */
  async function waitForEnd(
    request: Pick<Request, 'auth' | 'headers' | 'raw'>,
    id: DeploymentId,
    waitMs: number,
  ): Promise<DeploymentStatus> {
    const untilMs = effects.monotonicMs() + waitMs;
    const { keyId } = callerOf(request);
    const first = statusIn(reads.deployments.progressVisibleTo(callerOf(request), id));
    if (isTerminal(first)) return first;
    const watch = watches.open([id], keyId);
    closeWithResponse(watch, request);
    for (;;) {
      const caller = currentCaller(request, reads, effects.now());
      if (caller === undefined) throw wrongKey();
      // Read again, as it may have ended just before the watch was opened.
      const read = () => reads.deployments.progressVisibleTo(caller, id) ?? null;
      const status = statusIn(awaited(`${keyId} ${id}`, read));
      const leftMs = untilMs - effects.monotonicMs();
      if (isTerminal(status) || leftMs <= 0 || (await watch.next(leftMs)) === 'closed') return status;
    }
  }

  function statusIn(progress: DeploymentProgress | null | undefined): DeploymentStatus {
    if (progress === null || progress === undefined) throw notFound();
    return progress.status;
  }
}

const WAIT_MAX_SECONDS = 60;

const waitSeconds = wholeNumber({ min: 0, max: WAIT_MAX_SECONDS })
  .default(0)
  .description('How many seconds to wait for the end of the deployment.');

const NO_PROJECT = '';

const narrowing = {
  ...pageParameters,
  status: oneOrMoreOf(DEPLOYMENT_STATUSES).description('Only deployments with this status; may be repeated.'),
  ref: refSchema.description('Only deployments of exactly this ref.'),
  project_id: idSchema('prj').description('Only deployments of this project.'),
  ...creationParameters,
};
