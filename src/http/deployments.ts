import type { Plugin } from '@hapi/hapi';
import type { Deployment, Ref } from '../domain.ts';
import type { Store } from '../store/store.ts';
import { answerWrite } from './answers.ts';
import { callerOf } from './auth.ts';
import { notFound } from './errors.ts';
import { bodySchema, pathId, refSchema } from './validation.ts';

/** `maxQueued`: how many may wait in one project; null: any number. */
export function deployments({ reads, writer }: Store, maxQueued: number | null): Plugin<void> {
  return {
    name: 'deployments',
    register(server) {
      server.route<{ Params: { project_id: string }; Payload: { ref: Ref } }>({
        method: 'POST',
        path: '/v2/projects/{project_id}/deployments',
        options: {
          auth: { scope: 'deployments:write' },
          validate: { payload: bodySchema({ ref: refSchema.required() }) },
        },
        handler(request, h) {
          const caller = callerOf(request);
          const project = reads.projects.visibleTo(caller, pathId('prj', request.params.project_id));
          if (project === undefined) throw notFound();
          return answerWrite(request, h, writer, {
            operation: 'deployments.create',
            input: {
              projectId: project.id,
              ref: request.payload.ref,
              trigger: 'api',
              keyId: caller.keyId,
              redeployOf: null,
              maxQueued,
            },
            statusCode: 201,
            locationPrefix: '/v2/deployments/',
          });
        },
      });

      server.route<{ Params: { deployment_id: string } }>({
        method: 'GET',
        path: '/v2/deployments/{deployment_id}',
        options: { auth: { scope: 'deployments:read' } },
        handler(request): Deployment {
          const id = pathId('dpl', request.params.deployment_id);
          const deployment = reads.deployments.visibleTo(callerOf(request), id);
          if (deployment === undefined) throw notFound();
          return deployment;
        },
      });
    },
  };
}
