import { exampleOf } from './resources.ts';

// Example answers for operations where the resource's own example would be misleading.

/** A deployment that was canceled shortly after its start. */
export const CANCELING_DEPLOYMENT = {
  ...exampleOf('Deployment'),
  status: 'canceling',
  finished_at: null,
  duration_ms: null,
  exit_code: null,
  outputs: {},
};

/** A new deployment. */
export const QUEUED_DEPLOYMENT = {
  ...CANCELING_DEPLOYMENT,
  status: 'queued',
  started_at: null,
  queue_position: 1,
  log_bytes: 0,
};

/** A deployment that another system carried out. */
export const REPORTED_DEPLOYMENT = { ...exampleOf('Deployment'), exit_code: null, log_bytes: 0 };

/** A delivery that will be sent again. */
export const PENDING_DELIVERY = {
  ...exampleOf('Delivery'),
  status: 'pending',
  next_attempt_at: '2026-11-21T09:30:00.000Z',
  delivered_at: null,
};

export const PING_ATTEMPT = { ...exampleOf('Attempt'), trigger: 'ping' };
