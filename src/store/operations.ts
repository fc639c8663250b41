import type { WriteContext } from './context.ts';
import { deploymentWrites } from './deployments.ts';
import { type Answer, type IdempotencyMemory, idempotencyWrites } from './idempotency.ts';
import { instanceWrites } from './instance.ts';
import { keyWrites } from './keys.ts';
import { logWrites } from './logs.ts';
import { outboxWrites } from './outbox.ts';
import { projectWrites } from './projects.ts';
import { webhookWrites } from './webhooks.ts';

/** Every write there is, by name. Inputs and outputs are plain values: they may cross a thread. */
export function makeOperations(context: WriteContext) {
  const instance = instanceWrites(context);
  const keys = keyWrites(context);
  const projects = projectWrites(context);
  const deployments = deploymentWrites(context);
  const logs = logWrites(context);
  const webhooks = webhookWrites(context);
  const outbox = outboxWrites(context);
  const idempotency = idempotencyWrites(context);

  const operations = {
    'instance.probe': instance.probe,
    'keys.create': keys.create,
    'keys.revoke': keys.revoke,
    'keys.touch': keys.touch,
    'projects.create': projects.create,
    'projects.set': projects.set,
    'projects.setStatus': projects.setStatus,
    'deployments.create': deployments.create,
    'deployments.claim': deployments.claim,
    'deployments.setProcess': deployments.setProcess,
    'deployments.finish': deployments.finish,
    'logs.append': logs.append,
    'webhooks.create': webhooks.create,
    'outbox.settle': outbox.settle,
  };

  /** Any of these as an answer to an HTTP request: serialised here, once, and remembered for a repeat. */
  function answer(request: AnswerRequest): Answer {
    return idempotency.once(request.memory, () => {
      const result = operations[request.operation](request.input as never) as { id: string };
      return {
        statusCode: request.statusCode,
        location: request.locationPrefix === null ? null : `${request.locationPrefix}${result.id}`,
        body: JSON.stringify(result),
      };
    });
  }

  return { ...operations, answer };
}

/** The writes that HTTP performs; what they return is the body of the answer. */
export type AnswerRequest = {
  [Name in 'deployments.create' | 'webhooks.create']: {
    operation: Name;
    input: InputOf<Name>;
    memory: IdempotencyMemory | null;
    statusCode: number;
    /** `Location` is this and the new resource's id; null: no such header. */
    locationPrefix: string | null;
  };
}['deployments.create' | 'webhooks.create'];

export type Operations = ReturnType<typeof makeOperations>;
export type OperationName = keyof Operations;
export type InputOf<Name extends OperationName> = Parameters<Operations[Name]>[0];
export type OutputOf<Name extends OperationName> = ReturnType<Operations[Name]>;
