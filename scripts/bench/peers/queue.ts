/** How many jobs are put into a queue at once. */
export const FILL_MAX = 1_000;

/** One delivery, as a queue holds it. */
export interface Job {
  url: string;
  eventId: string;
  body: string;
  secret: string;
}

/** A job queue that delivers. */
export interface Queue {
  /** Takes at most `FILL_MAX` at a time. */
  fill(jobs: readonly Job[]): Promise<void>;
  /** Resolves when each was delivered by `deliver` and the queue has recorded it. */
  work(deliver: Deliver): Promise<void>;
}

/** Signs and sends a job; resolves to the status. Rejects unless it is a 2xx. */
type Deliver = (job: Job) => Promise<number>;
