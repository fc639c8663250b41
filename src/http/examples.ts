import { exampleOf } from './resources.ts';

// What an operation answers, where the example that its resource comes with would mislead.

/** As a deployment is that was canceled just after it began. */
export const CANCELING_DEPLOYMENT = {
  ...Object(exampleOf('Deployment')),
  status: 'canceling',
  finished_at: null,
  duration_ms: null,
  exit_code: null,
  outputs: {},
};

/** As one is when it was just made. */
export const QUEUED_DEPLOYMENT = {
  ...CANCELING_DEPLOYMENT,
  status: 'queued',
  started_at: null,
  queue_position: 1,
  log_bytes: 0,
};

/** As one is that another system has carried out. */
export const REPORTED_DEPLOYMENT = { ...Object(exampleOf('Deployment')), exit_code: null, log_bytes: 0 };

/** As a delivery is that is to be made once more. */
export const PENDING_DELIVERY = {
  ...Object(exampleOf('Delivery')),
  status: 'pending',
  next_attempt_at: '2026-11-21T09:30:00.000Z',
  delivered_at: null,
};

export const PING_ATTEMPT = { ...Object(exampleOf('Attempt')), trigger: 'ping' };
