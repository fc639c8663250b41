import type { Attempt, KeyId } from '../domain.ts';
import type { WriteContext } from './context.ts';
import { deliveryWrites } from './deliveries.ts';
import { deploymentReads } from './deployments.ts';
import { eventWrites } from './events.ts';
import { type Answer, idempotencyWrites, type RequestIdentity } from './idempotency.ts';
import { instanceWrites } from './instance.ts';
import { keyWrites } from './keys.ts';
import { logWrites } from './logs.ts';
import { projectWrites } from './projects.ts';
import { queueWrites } from './queue.ts';
import { replayWrites } from './replays.ts';
import { reportWrites } from './reports.ts';
import { retentionWrites } from './retention.ts';
import { settlementWrites } from './settlements.ts';
import { transitionWrites } from './transitions.ts';
import { webhookWrites } from './webhooks.ts';

/** All writes, by name. Inputs and outputs are plain values, so that they can be posted between threads. */
export function makeOperations(context: WriteContext) {
  const instance = instanceWrites(context);
  const keys = keyWrites(context);
  const projects = projectWrites(context);
  const deployments = deploymentReads(context.database);
  const events = eventWrites(context);
  const transitions = transitionWrites(context, deployments, events);
  const queue = queueWrites(context, deployments, projects, events, transitions);
  const reports = reportWrites(context, deployments, transitions);
  const logs = logWrites(context);
  const webhooks = webhookWrites(context);
  const deliveries = deliveryWrites(context);
  const replays = replayWrites(context);
  const settlements = settlementWrites(context);
  const idempotency = idempotencyWrites(context);
  const retention = retentionWrites(context);

  const operations = {
    'instance.probe': instance.probe,
    'instance.clockWasSet': instance.clockWasSet,
    'keys.create': keys.create,
    'keys.rotate': keys.rotate,
    'keys.revoke': keys.revoke,
    'keys.touch': keys.touch,
    'projects.create': projects.create,
    'projects.set': projects.set,
    'projects.setStatus': projects.setStatus,
    'projects.archive': queue.archive,
    'deployments.create': queue.create,
    'deployments.redeploy': queue.redeploy,
    'deployments.cancel': queue.cancel,
    'deployments.claim': queue.claim,
    'deployments.setProcess': queue.setProcess,
    'deployments.finish': transitions.finish,
    'deployments.report': reports.report,
    'deployments.endOverdue': reports.endOverdue,
    'deployments.moveReportsDue': reports.moveReportsDue,
    'logs.append': logs.append,
    'webhooks.create': webhooks.create,
    'webhooks.update': webhooks.update,
    'webhooks.rotate': webhooks.rotate,
    'webhooks.remove': webhooks.remove,
    'deliveries.redeliver': deliveries.redeliver,
    'replays.create': replays.create,
    'replays.step': replays.step,
    // A ping writes nothing: this lets `answer` store its response for the Idempotency-Key.
    'pings.keep': (attempt: Attempt): Attempt => attempt,
    'outbox.settle': settlements.settle,
    'outbox.setBack': settlements.setBack,
    'outbox.retryNow': settlements.retryNow,
    'idempotency.recall': idempotency.recall,
    'retention.step': retention.step,
  };

  /**
   * Performs a write for an HTTP request, and serialises and stores the response, so that a repeated request gets the
   * same bytes. Throws `unauthorized` if the key was revoked after the request had been authenticated.
   */
  function answer(request: AnswerRequest): Answer {
    keys.refuseRevoked(request.keyId);
    return idempotency.once(request.identity, () => {
      const result = operations[request.operation](request.input as never) as { id: string } | undefined;
      return {
        statusCode: request.statusCode,
        location: request.locationPrefix === null ? null : `${request.locationPrefix}${result?.id}`,
        body: result === undefined ? '' : JSON.stringify(result),
      };
    });
  }

  return { ...operations, answer };
}

/** The writes that HTTP requests perform. What they return is the body of the response; undefined: no body. */
export type AnsweringOperation =
  | 'deployments.create'
  | 'deployments.redeploy'
  | 'deployments.cancel'
  | 'deployments.report'
  | 'webhooks.create'
  | 'webhooks.update'
  | 'webhooks.rotate'
  | 'webhooks.remove'
  | 'deliveries.redeliver'
  | 'replays.create'
  | 'pings.keep';

export type AnswerRequest = {
  [Name in AnsweringOperation]: {
    operation: Name;
    input: InputOf<Name>;
    /** The key that makes the request. */
    keyId: KeyId;
    identity: RequestIdentity | null;
    statusCode: number;
    /** The `Location` header is this followed by the new resource's id; null: no such header. */
    locationPrefix: string | null;
  };
}[AnsweringOperation];

type Operations = ReturnType<typeof makeOperations>;
export type OperationName = keyof Operations;
export type InputOf<Name extends OperationName> = Parameters<Operations[Name]>[0];
export type OutputOf<Name extends OperationName> = ReturnType<Operations[Name]>;
