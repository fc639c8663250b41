import type { Plugin, ResponseObject } from '@hapi/hapi';
import type { Project } from '../domain.ts';
import type { Reads } from '../store/store.ts';
import { callerOf } from './auth.ts';
import { notFound } from './errors.ts';
import { pageParameters, querySchema } from './input-schemas.ts';
import type { Pages } from './pages.ts';
import { routeOptions } from './route-options.ts';
import { pathId } from './validation.ts';

/** The projects that a key sees: a list, and one by its id. */
export function projects({ projects, cache }: Reads, pages: Pages): Plugin<void> {
  const listed = cache<string>();
  return {
    name: 'projects',
    register(server) {
      server.route<{ Query: { limit: number; cursor?: string } }>({
        method: 'GET',
        path: '/v2/projects',
        options: routeOptions({
          scope: 'projects:read',
          input: { query: querySchema(pageParameters) },
          operationId: 'listProjects',
          summary: 'List projects',
          description: 'The projects that the key sees, oldest first.',
          responses: { 200: { description: 'A page of projects.', pageOf: 'Project' } },
        }),
        handler(request, h): ResponseObject {
          const { limit, cursor } = request.query;
          const caller = callerOf(request);
          const page = listed(JSON.stringify([caller.keyId, limit, cursor]), () => {
            const walk = { list: 'projects', filters: {}, keyId: caller.keyId };
            const afterSeq = pages.position(walk, cursor, 0);
            return JSON.stringify(pages.page(walk, projects.page(caller, afterSeq, limit)));
          });
          return h.response(page).type('application/json');
        },
      });

      server.route<{ Params: { project_id: string } }>({
        method: 'GET',
        path: '/v2/projects/{project_id}',
        options: routeOptions({
          scope: 'projects:read',
          operationId: 'getProject',
          summary: 'Get a project',
          responses: { 200: { description: 'The project.', resource: 'Project' } },
        }),
        handler(request): Project {
          const project = projects.visibleTo(callerOf(request), pathId('prj', request.params.project_id));
          if (project === undefined) throw notFound();
          return project;
        },
      });
    },
  };
}
