import {
  type Key,
  type KeyId,
  newId,
  optionalTimestamp,
  type ProjectId,
  type Scope,
  type Timestamp,
  timestamp,
} from '../domain.ts';
import { AppError, wrongKey } from '../errors.ts';
import { hashKeySecret, isKeySecret, newKeySecret } from '../secrets.ts';
import type { WriteContext } from './context.ts';
import type { Database } from './database.ts';
import { createMoments, createReadCache, type Moment } from './read-cache.ts';

/** The key that makes a request, as authentication found it. */
export interface Caller {
  keyId: KeyId;
  scopes: readonly Scope[];
  allProjects: boolean;
  lastUsedAtMs: number | null;
}

export interface NewKey {
  name: string;
  scopes: Scope[];
  allProjects: boolean;
  projectIds: ProjectId[];
  expiresInMs: number | null;
}

/** A secret that was replaced and still works. */
export interface OutgoingSecret {
  last4: string;
  expires_at: Timestamp;
}

interface KeyRow extends Pick<Key, 'id' | 'name' | 'last4'> {
  scopes: string;
  all_projects: number;
  created_at: number;
  expires_at: number | null;
  revoked_at: number | null;
  last_used_at: number | null;
  rotated_at: number | null;
  project_ids: string;
}

interface CallerRow {
  id: KeyId;
  scopes: string;
  all_projects: number;
  last_used_at: number | null;
  /** When the key or its secret expires, whichever is first. */
  ends_at: number | null;
}

const KEY_COLUMNS = `
  k.id, k.name, k.scopes, k.all_projects, k.created_at, k.expires_at, k.revoked_at, k.last_used_at,
  (SELECT s.last4 FROM key_secrets s WHERE s.key_id = k.id AND s.expires_at IS NULL) AS last4,
  (SELECT nullif(s.created_at, k.created_at) FROM key_secrets s
    WHERE s.key_id = k.id AND s.expires_at IS NULL) AS rotated_at,
  (SELECT json_group_array(p.project_id) FROM key_projects p WHERE p.key_id = k.id) AS project_ids`;

/** Keys, and authentication by their secrets. */
export function keyReads(database: Database, moment: () => Moment = createMoments(database)) {
  const bySecretHash = database.prepare<[Uint8Array], CallerRow>(`
    SELECT k.id, k.scopes, k.all_projects, k.last_used_at,
           min(coalesce(k.expires_at, s.expires_at), coalesce(s.expires_at, k.expires_at)) AS ends_at
      FROM key_secrets s
      JOIN keys k ON k.id = s.key_id
     WHERE s.hash = +? AND k.revoked_at IS NULL`);
  const found = createReadCache<{ caller: Caller; endsAtMs: number | null } | null>(moment);
  const byId = database.prepare<[string], KeyRow>(`SELECT ${KEY_COLUMNS} FROM keys k WHERE k.id = +?`);
  const byName = database.prepare<{ name: string; nowMs: number }, KeyRow & { precedence: number }>(`
    SELECT ${KEY_COLUMNS},
           CASE WHEN k.revoked_at IS NOT NULL THEN 2 WHEN k.expires_at <= +:nowMs THEN 1 ELSE 0 END AS precedence
      FROM keys k
     WHERE k.name = +:name
     ORDER BY precedence LIMIT 2`);
  const all = database.prepare<[], KeyRow>(`SELECT ${KEY_COLUMNS} FROM keys k ORDER BY k.seq`);
  const outgoing = database.prepare<{ keyId: string; nowMs: number }, { last4: string; ends_at: number }>(`
    SELECT s.last4, min(s.expires_at, coalesce(k.expires_at, s.expires_at)) AS ends_at
      FROM key_secrets s
      JOIN keys k ON k.id = s.key_id
     WHERE s.key_id = +:keyId AND ends_at > +:nowMs
     ORDER BY s.expires_at`);

  return {
    /** The key with this secret, as of the latest commit; undefined if there is none, or it is expired or revoked. */
    authenticate(secret: string, nowMs: number): Caller | undefined {
      // Not remembered: a stranger's made-up keys would drive those in use out of the cache.
      if (!isKeySecret(secret)) return undefined;
      const hash = hashKeySecret(secret);
      const known = found(hash, () => {
        const row = bySecretHash.get(Buffer.from(hash, 'hex'));
        return row === undefined ? null : { caller: toCaller(row), endsAtMs: row.ends_at };
      });
      if (known === null || (known.endsAtMs !== null && known.endsAtMs <= nowMs)) return undefined;
      return known.caller;
    },

    get(id: string): Key | undefined {
      const row = byId.get(id);
      return row === undefined ? undefined : toKey(row);
    },

    /**
     * Finds a key by id, or by a name that only one key has; a key that has expired gives way to one that lives, and a
     * revoked one to both. Throws `not_found`, and `conflict` for a name that several have.
     */
    resolve(idOrName: string, nowMs: number): Key {
      const row = byId.get(idOrName);
      if (row !== undefined) return toKey(row);
      const [named, another] = byName.all({ name: idOrName, nowMs });
      if (named === undefined) throw noSuchKey();
      if (another?.precedence === named.precedence) {
        throw new AppError('conflict', 'several keys have this name: use the id');
      }
      return toKey(named);
    },

    /** Replaced secrets that still work, the first to expire first: no later than the key does. */
    outgoingSecrets: (keyId: KeyId, nowMs: number): OutgoingSecret[] =>
      outgoing.all({ keyId, nowMs }).map(({ last4, ends_at }) => ({ last4, expires_at: timestamp(ends_at) })),

    /** Oldest first, revoked ones too. */
    list: (): Key[] => all.all().map(toKey),
  };
}

/** Creates, rotates and revokes keys. Only hashes of secrets are stored. */
export function keyWrites({ database, effects }: WriteContext) {
  const reads = keyReads(database);
  const insertKey = database.prepare(`
    INSERT INTO keys (id, name, scopes, all_projects, created_at, expires_at)
    VALUES (:id, :name, :scopes, :allProjects, :createdAt, :expiresAt)`);
  const insertSecret = database.prepare(`
    INSERT INTO key_secrets (hash, key_id, last4, created_at) VALUES (:hash, :keyId, :last4, :createdAt)`);
  const insertProject = database.prepare('INSERT INTO key_projects (key_id, project_id) VALUES (?, ?)');
  const projectExists = database.prepare('SELECT 1 FROM projects WHERE id = +?').pluck();
  const markRevoked = database.prepare('UPDATE keys SET revoked_at = ? WHERE id = +? AND revoked_at IS NULL');
  const disableWebhooks = database.prepare(`
    UPDATE webhooks SET status = 'disabled', status_reason = 'the key that registered it was revoked'
     WHERE key_id = +? AND deleted_at IS NULL`);
  // The replays of disabled webhooks would wait for ever, and retention would keep the deliveries that they select.
  const endReplays = database.prepare(`
    UPDATE replays SET finished_at = ?
     WHERE finished_at IS NULL AND webhook_id IN (SELECT id FROM webhooks WHERE key_id = +?)`);
  const endSecrets = database.prepare(`
    UPDATE key_secrets SET expires_at = :endsAt
     WHERE key_id = +:keyId AND (expires_at IS NULL OR expires_at > +:endsAt)`);
  const forgetEndedSecrets = database.prepare(
    'DELETE FROM key_secrets WHERE key_id = +:keyId AND expires_at <= +:nowMs',
  );
  const isRevoked = database
    .prepare<[KeyId], number>('SELECT 1 FROM keys WHERE id = +? AND revoked_at IS NOT NULL')
    .pluck();
  const touch = database.prepare('UPDATE keys SET last_used_at = :atMs WHERE id = +:keyId');

  return {
    /** Returns the secret, which is not stored. Throws `not_found` for a project that does not exist. */
    create(input: NewKey): { key: Key; secret: string } {
      const id = newId('key', effects);
      const createdAt = effects.now();
      insertKey.run({
        id,
        name: input.name,
        scopes: JSON.stringify(input.scopes),
        allProjects: input.allProjects ? 1 : 0,
        createdAt,
        expiresAt: input.expiresInMs === null ? null : createdAt + input.expiresInMs,
      });
      const secret = addSecret(id, createdAt);
      for (const projectId of new Set(input.projectIds)) {
        if (projectExists.get(projectId) === undefined) {
          throw new AppError('not_found', `there is no project ${projectId}`);
        }
        insertProject.run(id, projectId);
      }
      return { key: existing(id), secret };
    },

    /**
     * Gives the key a new secret and returns it; it is not stored. Earlier secrets work for at most another
     * `overlapMs`. Throws `not_found`, and `conflict` for a key that is revoked or has expired.
     */
    rotate({ id, overlapMs }: { id: string; overlapMs: number }): { key: Key; secret: string } {
      const before = existing(id);
      const now = effects.now();
      if (before.revoked_at !== null) throw new AppError('conflict', 'the key is revoked: create a new one');
      if (before.expires_at !== null && Date.parse(before.expires_at) <= now) {
        throw new AppError('conflict', 'the key has expired: create a new one');
      }
      endSecrets.run({ keyId: id, endsAt: now + overlapMs });
      forgetEndedSecrets.run({ keyId: id, nowMs: now });
      const secret = addSecret(id, now);
      return { key: existing(id), secret };
    },

    /**
     * Revokes a key from the next request on. Its webhooks are disabled and their replays ended, so that nothing more
     * is sent to them. Revoking it again changes nothing. Throws `not_found`.
     */
    revoke({ id }: { id: string }): Key {
      existing(id);
      const at = effects.now();
      if (markRevoked.run(at, id).changes > 0) {
        disableWebhooks.run(id);
        endReplays.run(at, id);
      }
      return existing(id);
    },

    /**
     * Refuses the write of a request whose key was revoked after the request had been authenticated. Throws
     * `unauthorized`.
     */
    refuseRevoked(id: KeyId): void {
      if (isRevoked.get(id) !== undefined) throw wrongKey();
    },

    /** Sets when the key was last used. Also to an earlier time: one in the future would be corrected at every use. */
    touch(input: { keyId: KeyId; atMs: number }): void {
      touch.run(input);
    },
  };

  function addSecret(keyId: string, createdAt: number): string {
    const secret = newKeySecret(effects.randomBytes);
    const hash = Buffer.from(hashKeySecret(secret), 'hex');
    insertSecret.run({ hash, keyId, last4: secret.slice(-4), createdAt });
    return secret;
  }

  function existing(id: string): Key {
    const key = reads.get(id);
    if (key === undefined) throw noSuchKey();
    return key;
  }
}

function noSuchKey(): AppError {
  return new AppError('not_found', 'there is no such key: `davit admin key list` shows all');
}

function toCaller(row: CallerRow): Caller {
  return {
    keyId: row.id,
    scopes: JSON.parse(row.scopes) as Scope[],
    allProjects: row.all_projects === 1,
    lastUsedAtMs: row.last_used_at,
  };
}

function toKey(row: KeyRow): Key {
  return {
    id: row.id,
    name: row.name,
    last4: row.last4,
    scopes: JSON.parse(row.scopes) as Scope[],
    all_projects: row.all_projects === 1,
    project_ids: JSON.parse(row.project_ids) as ProjectId[],
    created_at: timestamp(row.created_at),
    rotated_at: optionalTimestamp(row.rotated_at),
    expires_at: optionalTimestamp(row.expires_at),
    revoked_at: optionalTimestamp(row.revoked_at),
    last_used_at: optionalTimestamp(row.last_used_at),
  };
}
