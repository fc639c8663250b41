import { randomBytes } from 'node:crypto';

/** How to connect to a PostgreSQL, as pg takes it. */
export interface PostgresPlace {
  /** The directory of its Unix socket. */
  host: string;
  user: string;
  database: string;
}

/** The part of `pg` that is used here: it is not among davit's dependencies. */
interface PostgresPool {
  query(statement: string | { name: string; text: string; values: unknown[] }): Promise<{ rows: unknown[] }>;
  end(): Promise<void>;
}

export async function connectToPostgres(place: PostgresPlace, connections: number): Promise<PostgresPool> {
  const name = 'pg';
  const { default: pg } = (await import(name)) as {
    default: { Pool: new (options: PostgresPlace & { max: number }) => PostgresPool };
  };
  return new pg.Pool({ ...place, max: connections });
}

const SCHEMA = `
  CREATE TABLE deployments (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, project_id text NOT NULL,
    ref text NOT NULL, status text NOT NULL, created_at timestamptz NOT NULL DEFAULT now());
  CREATE INDEX ON deployments (project_id, seq);
  CREATE TABLE events (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, type text NOT NULL,
    deployment_id text NOT NULL, created_at timestamptz NOT NULL DEFAULT now(), payload text NOT NULL);
  CREATE TABLE deliveries (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, event_id text NOT NULL,
    webhook_id text NOT NULL, status text NOT NULL, next_attempt_at timestamptz NOT NULL DEFAULT now());
  CREATE INDEX ON deliveries (webhook_id, next_attempt_at) WHERE status = 'pending';
  CREATE TABLE idempotency_keys (
    key_id text NOT NULL, idempotency_key text NOT NULL, body text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (key_id, idempotency_key))`;

/** Inserts all four rows by one prepared statement, so with a single round trip. */
const INSERT = `
  WITH deployment AS (
    INSERT INTO deployments (id, project_id, ref, status) VALUES ($1, 'prj_1', $2, 'queued')
  ), event AS (
    INSERT INTO events (id, type, deployment_id, payload) VALUES ($3, 'deployment.created', $1, $5)
  ), delivery AS (
    INSERT INTO deliveries (id, event_id, webhook_id, status) VALUES ($4, $3, 'whk_1', 'pending')
  )
  INSERT INTO idempotency_keys (key_id, idempotency_key, body) VALUES ('key_1', $6, $5)`;

/** Twice as many as there are concurrent commits on a small machine; more were slower. */
const CONNECTIONS = 32;

/** Stores a deployment with its event, outbox row and idempotency key, in one transaction. */
export async function createPostgresAnswers(
  place: PostgresPlace,
  answer: string,
): Promise<(ref: string, idempotencyKey: string) => Promise<void>> {
  const pool = await connectToPostgres(place, CONNECTIONS);
  await pool.query(SCHEMA);
  const newId = (prefix: string) => `${prefix}_${randomBytes(12).toString('hex')}`;
  return async (ref, idempotencyKey) => {
    const values = [newId('dpl'), ref, newId('evt'), newId('dlv'), answer, idempotencyKey];
    await pool.query({ name: 'accept', text: INSERT, values });
  };
}
