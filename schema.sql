-- The schema of davit's one file. Read this first: everything the service knows is in these tables.
--
-- Times are milliseconds since 1970 and durations are milliseconds, both INTEGER. Ids are the text that people see.
-- `seq` is the order in which rows were inserted: lists are read in it. A row keeps its seq, and no seq is reused.
-- Constraints that SQLite can enforce are enforced here, so that code that violates one fails loudly.
--
-- A CHECK with more than two allowed words uses OR: for IN (...) SQLite builds a temporary table at every check, and
-- inserting a deployment evaluates eight of them. That took 80 µs, and takes 69 with OR.
--
-- A released schema never changes. To change it, make the next version with a step in src/store/migrations.ts, which
-- says how.

PRAGMA application_id = 1684108916; -- 'davt'
PRAGMA user_version = 4;

-- One row: values of the file as a whole.
CREATE TABLE instance (
  only_row        INTEGER PRIMARY KEY CHECK (only_row = 1),
  created_at      INTEGER NOT NULL,
  probes          INTEGER NOT NULL DEFAULT 0, -- incremented to test whether the disk accepts a write
  webhook_changes INTEGER NOT NULL DEFAULT 0, -- incremented by the triggers below webhook_secrets
  cursor_secret   BLOB    NOT NULL CHECK (length(cursor_secret) = 32), -- authenticates page cursors, also after a restore
  davit_version   TEXT    NOT NULL -- created or last migrated the schema; an older davit that refuses the file names it
) STRICT;

-- The last hundred times that the machine's clock was set while davit ran. After a restart, too, davit must not take
-- time that the clock skipped for time that passed.
CREATE TABLE clock_settings (
  seq   INTEGER PRIMARY KEY AUTOINCREMENT,
  at    INTEGER NOT NULL, -- the clock's new time
  by_ms INTEGER NOT NULL  -- positive: set ahead; negative: set back
) STRICT;

-- Who may call the API.
CREATE TABLE keys (
  seq          INTEGER PRIMARY KEY AUTOINCREMENT,
  id           TEXT    NOT NULL UNIQUE CHECK (id GLOB 'key_*'),
  name         TEXT    NOT NULL CHECK (name <> ''),
  scopes       TEXT    NOT NULL CHECK (json_type(scopes) = 'array'),
  all_projects INTEGER NOT NULL CHECK (all_projects IN (0, 1)), -- 0: only those in key_projects
  created_at   INTEGER NOT NULL,
  expires_at   INTEGER,
  revoked_at   INTEGER,
  last_used_at INTEGER -- written at most once a minute
) STRICT;

-- The secrets of a key: one, or more while a rotation overlaps. Only the SHA-256 is stored: a secret has 256 random
-- bits, so a slow hash would add no protection.
CREATE TABLE key_secrets (
  hash       BLOB    NOT NULL PRIMARY KEY CHECK (length(hash) = 32),
  key_id     TEXT    NOT NULL REFERENCES keys (id),
  last4      TEXT    NOT NULL CHECK (length(last4) = 4),
  created_at INTEGER NOT NULL,
  expires_at INTEGER -- set when a newer secret replaces this one
) STRICT, WITHOUT ROWID;
CREATE INDEX key_secrets_of_key ON key_secrets (key_id);

CREATE TABLE projects (
  seq               INTEGER PRIMARY KEY AUTOINCREMENT,
  id                TEXT    NOT NULL UNIQUE CHECK (id GLOB 'prj_*'),
  name              TEXT    NOT NULL CHECK (name <> ''),
  status            TEXT    NOT NULL CHECK (status = 'active' OR status = 'paused' OR status = 'archived'),
  created_at        INTEGER NOT NULL,
  command           TEXT    CHECK (json_type(command) = 'array'), -- argument vector; null: another system does the work
  directory         TEXT    CHECK (directory GLOB '/*'),          -- where the command runs; null: in an empty directory each time
  timeout_ms        INTEGER CHECK (timeout_ms > 0),               -- null: no limit
  idle_timeout_ms   INTEGER CHECK (idle_timeout_ms > 0),          -- null: no limit
  report_timeout_ms INTEGER CHECK (report_timeout_ms > 0),        -- null: a reported deployment may stay open for ever
  policy            TEXT    NOT NULL CHECK (policy IN ('queue', 'latest')),
  -- So that neither creating a deployment nor choosing the next project has to count a queue. src/store/queue.ts counts
  -- those that join it, and the trigger below deployments maintains all else: because of a trigger on the insert, SQLite
  -- could undo the insert alone, for which it copied every page that it changed, and creating took 38 µs instead of 34.5.
  queued_count      INTEGER NOT NULL DEFAULT 0 CHECK (queued_count >= 0), -- deployments that wait for the executor
  last_started_at   INTEGER NOT NULL DEFAULT 0                           -- projects take turns: the earliest is next
) STRICT;
CREATE INDEX projects_waiting ON projects (last_started_at, seq) WHERE queued_count > 0 AND status = 'active';

-- The environment variables of the project's command. Most values are secrets: nothing prints them.
CREATE TABLE project_variables (
  project_id TEXT NOT NULL REFERENCES projects (id),
  name       TEXT NOT NULL,
  value      TEXT NOT NULL,
  PRIMARY KEY (project_id, name)
) STRICT, WITHOUT ROWID;

-- The projects that a key without all_projects sees.
CREATE TABLE key_projects (
  key_id     TEXT NOT NULL REFERENCES keys (id),
  project_id TEXT NOT NULL REFERENCES projects (id),
  PRIMARY KEY (key_id, project_id)
) STRICT, WITHOUT ROWID;
-- Which keys see a project: an event finds its webhooks without reading those of other projects.
CREATE INDEX key_projects_of_project ON key_projects (project_id);
CREATE INDEX keys_of_all_projects ON keys (id) WHERE all_projects = 1 AND revoked_at IS NULL;

CREATE TABLE deployments (
  seq                INTEGER PRIMARY KEY AUTOINCREMENT,
  id                 TEXT    NOT NULL UNIQUE CHECK (id GLOB 'dpl_*'),
  project_id         TEXT    NOT NULL REFERENCES projects (id),
  ref                TEXT    NOT NULL CHECK (length(ref) BETWEEN 1 AND 255),
  status             TEXT    NOT NULL CHECK (status = 'queued' OR status = 'running' OR status = 'canceling'
                                       OR status = 'succeeded' OR status = 'failed' OR status = 'canceled'),
  reason             TEXT    CHECK (reason = 'exit_code' OR reason = 'signal' OR reason = 'timeout'
                                 OR reason = 'idle_timeout' OR reason = 'spawn_failed' OR reason = 'interrupted'
                                 OR reason = 'user' OR reason = 'superseded' OR reason = 'reported'
                                 OR reason = 'report_timeout'),
  message            TEXT,
  reported           INTEGER NOT NULL CHECK (reported IN (0, 1)), -- 1: its project had no command; another system does the work
  trigger            TEXT    NOT NULL CHECK (trigger = 'api' OR trigger = 'redeploy' OR trigger = 'admin'),
  created_by_key_id  TEXT    REFERENCES keys (id), -- null: made on the machine
  redeploy_of        TEXT    CHECK (redeploy_of GLOB 'dpl_*'),   -- no foreign keys: either deployment may be pruned first
  superseded_by      TEXT    CHECK (superseded_by GLOB 'dpl_*'),
  created_at         INTEGER NOT NULL,
  started_at         INTEGER,
  finished_at        INTEGER,
  report_due_at      INTEGER, -- when a reported deployment becomes failed with the reason report_timeout
  exit_code          INTEGER,
  signal             TEXT,
  outputs            TEXT    NOT NULL DEFAULT '{}' CHECK (json_type(outputs) = 'object'),
  log_bytes          INTEGER NOT NULL DEFAULT 0, -- all bytes printed, including those not kept
  log_truncated      INTEGER NOT NULL DEFAULT 0 CHECK (log_truncated IN (0, 1)),
  -- The command's process. The three together identify it for good; a process id alone is reused.
  process_id         INTEGER,
  process_started_at INTEGER, -- field 22 of /proc/<pid>/stat: clock ticks since boot
  boot_id            TEXT,    -- /proc/sys/kernel/random/boot_id
  CHECK ((finished_at IS NOT NULL) = (status = 'succeeded' OR status = 'failed' OR status = 'canceled')),
  CHECK (status <> 'queued' OR started_at IS NULL),
  CHECK (status NOT IN ('running', 'canceling') OR started_at IS NOT NULL),
  CHECK (status <> 'failed' OR reason IS NOT NULL)
) STRICT;
CREATE INDEX deployments_of_project ON deployments (project_id, seq);
CREATE INDEX deployments_unfinished ON deployments (seq) WHERE finished_at IS NULL; -- queued, running and canceling
CREATE INDEX deployments_queued ON deployments (project_id, seq) WHERE status = 'queued' AND reported = 0;
CREATE UNIQUE INDEX one_running_deployment_per_project ON deployments (project_id)
  WHERE status IN ('running', 'canceling') AND reported = 0;
CREATE INDEX deployments_open_reports ON deployments (report_due_at)
  WHERE reported = 1 AND finished_at IS NULL AND report_due_at IS NOT NULL;
-- Finds DEPLOY_PREVIOUS_REF, however many deployments have failed since.
CREATE INDEX deployments_succeeded ON deployments (project_id, seq) WHERE status = 'succeeded';
CREATE INDEX deployments_finished ON deployments (finished_at) WHERE finished_at IS NOT NULL; -- for retention

CREATE TRIGGER deployment_leaves_queue AFTER UPDATE OF status ON deployments
WHEN OLD.status = 'queued' AND NEW.status <> 'queued' AND OLD.reported = 0
BEGIN
  UPDATE projects
     SET queued_count = queued_count - 1,
         last_started_at = CASE NEW.status WHEN 'running' THEN NEW.started_at ELSE last_started_at END
   WHERE id = NEW.project_id;
END;

-- A terminal status never changes, whatever the code does.
CREATE TRIGGER deployment_end_is_final BEFORE UPDATE OF status ON deployments
WHEN OLD.finished_at IS NOT NULL AND NEW.status <> OLD.status
BEGIN
  SELECT RAISE(ABORT, 'a finished deployment changes no more');
END;

-- What commands printed: the first 256 KiB and the last 5 MiB, in chunks. `start` is the number of bytes printed before
-- the chunk; a gap between two chunks stands for bytes that were not kept.
CREATE TABLE log_chunks (
  deployment_id TEXT    NOT NULL REFERENCES deployments (id),
  start         INTEGER NOT NULL CHECK (start >= 0),
  bytes         BLOB    NOT NULL CHECK (length(bytes) > 0),
  UNIQUE (deployment_id, start)
) STRICT;

-- What happened to deployments. `payload` is serialised once, and every delivery sends these bytes.
CREATE TABLE events (
  seq           INTEGER PRIMARY KEY AUTOINCREMENT,
  id            TEXT    NOT NULL UNIQUE CHECK (id GLOB 'evt_*'),
  type          TEXT    NOT NULL CHECK (type = 'deployment.succeeded' OR type = 'deployment.failed' OR type = 'deployment.created'
                                  OR type = 'deployment.started' OR type = 'deployment.canceled'),
  deployment_id TEXT    NOT NULL, -- no foreign keys: an event may outlive its deployment
  project_id    TEXT    NOT NULL,
  created_at    INTEGER NOT NULL,
  payload       TEXT    NOT NULL
) STRICT;
CREATE INDEX events_by_age ON events (created_at); -- for retention
-- One terminal event for each deployment, however often davit crashes.
CREATE UNIQUE INDEX one_terminal_event_per_deployment ON events (deployment_id)
  WHERE type = 'deployment.succeeded' OR type = 'deployment.failed' OR type = 'deployment.canceled';

CREATE TABLE webhooks (
  seq                  INTEGER PRIMARY KEY AUTOINCREMENT,
  id                   TEXT    NOT NULL UNIQUE CHECK (id GLOB 'whk_*'),
  key_id               TEXT    NOT NULL REFERENCES keys (id), -- the only key that sees it; it is sent events of that key's projects
  url                  TEXT    NOT NULL,                      -- normalised by WHATWG URL before it was checked
  events               TEXT    NOT NULL CHECK (json_type(events) = 'array'),
  description          TEXT,
  status               TEXT    NOT NULL CHECK (status IN ('enabled', 'disabled')),
  status_reason        TEXT,
  created_at           INTEGER NOT NULL,
  enabled_at           INTEGER NOT NULL, -- when it was last enabled: deliveries held until then begin a new ladder
  last_success_at      INTEGER,
  last_failure_at      INTEGER,
  failing_since        INTEGER, -- first failure after the last success, or after three days without an attempt
  consecutive_failures INTEGER NOT NULL DEFAULT 0,
  deleted_at           INTEGER  -- no longer visible to anybody; it and its deliveries are pruned in small steps
) STRICT;
CREATE INDEX webhooks_of_key ON webhooks (key_id, seq) WHERE deleted_at IS NULL;

-- One row for each event type that a webhook subscribes to; deleting the webhook removes its rows.
CREATE TABLE webhook_subscriptions (
  event_type TEXT NOT NULL,
  webhook_id TEXT NOT NULL REFERENCES webhooks (id),
  PRIMARY KEY (event_type, webhook_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX webhook_subscriptions_of_webhook ON webhook_subscriptions (webhook_id);

-- The signing secrets of a webhook: one, or more while a rotation overlaps. In plain text, as signing needs them.
CREATE TABLE webhook_secrets (
  webhook_id TEXT    NOT NULL REFERENCES webhooks (id),
  secret     TEXT    NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER, -- null for the newest
  PRIMARY KEY (webhook_id, secret)
) STRICT, WITHOUT ROWID;

-- These triggers invalidate the dispatcher's cache of URLs and secrets: see src/store/recipients.ts.
CREATE TRIGGER webhook_is_sent_to_otherwise AFTER UPDATE OF url, status, enabled_at, deleted_at ON webhooks
WHEN (OLD.url, OLD.status, OLD.enabled_at, OLD.deleted_at) IS NOT (NEW.url, NEW.status, NEW.enabled_at, NEW.deleted_at)
BEGIN
  UPDATE instance SET webhook_changes = webhook_changes + 1;
END;

CREATE TRIGGER webhook_signs_with_another AFTER INSERT ON webhook_secrets
BEGIN
  UPDATE instance SET webhook_changes = webhook_changes + 1;
END;

CREATE TRIGGER webhook_signs_for_another_time AFTER UPDATE ON webhook_secrets
BEGIN
  UPDATE instance SET webhook_changes = webhook_changes + 1;
END;

CREATE TRIGGER webhook_signs_with_one_less AFTER DELETE ON webhook_secrets
BEGIN
  UPDATE instance SET webhook_changes = webhook_changes + 1;
END;

-- The outbox: one row for each event and each webhook that it is sent to.
CREATE TABLE deliveries (
  seq              INTEGER PRIMARY KEY AUTOINCREMENT,
  id               TEXT    NOT NULL UNIQUE CHECK (id GLOB 'dlv_*'),
  event_id         TEXT    NOT NULL REFERENCES events (id),
  event_type       TEXT    NOT NULL,
  webhook_id       TEXT    NOT NULL REFERENCES webhooks (id),
  -- A pending delivery of a disabled webhook is shown as held: so disabling and enabling change one row, however many
  -- deliveries wait.
  status           TEXT    NOT NULL CHECK (status = 'pending' OR status = 'delivered' OR status = 'exhausted'),
  attempt_count    INTEGER NOT NULL DEFAULT 0,
  next_attempt_at  INTEGER, -- null unless pending
  created_at       INTEGER NOT NULL,
  delivered_at     INTEGER,
  -- A ladder is one pass through the retry delays. Enabling the webhook, a redelivery and a replay each begin another.
  ladder_started_at INTEGER NOT NULL, -- when its first attempt was made; before that, since when it is due
  ladder_attempts  INTEGER NOT NULL DEFAULT 0,
  ladder_trigger   TEXT    NOT NULL CHECK (ladder_trigger = 'schedule' OR ladder_trigger = 'redeliver'
                                        OR ladder_trigger = 'replay'),
  CHECK ((status = 'pending') = (next_attempt_at IS NOT NULL)),
  CHECK (status <> 'delivered' OR delivered_at IS NOT NULL)
) STRICT;
-- Grouped by webhook: a claim seeks from one webhook to the next, so its cost does not grow with anybody's backlog.
CREATE INDEX deliveries_pending ON deliveries (webhook_id, next_attempt_at, seq) WHERE status = 'pending';
CREATE INDEX deliveries_of_webhook ON deliveries (webhook_id, seq);
CREATE INDEX deliveries_of_event ON deliveries (event_id);

-- Every attempt to deliver, successful or not. The rowids are in the order in which they were recorded.
CREATE TABLE attempts (
  delivery_id    TEXT    NOT NULL REFERENCES deliveries (id),
  number         INTEGER NOT NULL CHECK (number >= 1),
  at             INTEGER NOT NULL,
  status_code    INTEGER,
  error          TEXT,
  duration_ms    INTEGER NOT NULL,
  remote_address TEXT,
  response_body  TEXT, -- the first 4 KiB at most; kept of the latest 20 attempts of a delivery
  trigger        TEXT    NOT NULL CHECK (trigger = 'schedule' OR trigger = 'redeliver' OR trigger = 'replay'),
  UNIQUE (delivery_id, number)
) STRICT;

-- Jobs that send a webhook's past deliveries again, in small steps; after a restart they continue at `done_seq`.
CREATE TABLE replays (
  seq             INTEGER PRIMARY KEY AUTOINCREMENT,
  webhook_id      TEXT    NOT NULL REFERENCES webhooks (id),
  since           INTEGER NOT NULL,
  until           INTEGER NOT NULL,
  delivery_status TEXT    CHECK (delivery_status = 'pending' OR delivery_status = 'delivered'
                                       OR delivery_status = 'exhausted'), -- null: any status
  last_seq        INTEGER NOT NULL, -- the webhook's last delivery when the replay was requested
  done_seq        INTEGER NOT NULL DEFAULT 0, -- deliveries up to this one have begun their new ladder
  created_at      INTEGER NOT NULL,
  finished_at     INTEGER,
  last_attempt    INTEGER NOT NULL DEFAULT 0 -- rowid of the last of all attempts at its request; 0: there was none
) STRICT;
CREATE INDEX replays_open ON replays (webhook_id) WHERE finished_at IS NULL;

-- The responses to writes that carried an Idempotency-Key, byte for byte.
CREATE TABLE idempotency_keys (
  key_id          TEXT    NOT NULL REFERENCES keys (id),
  idempotency_key TEXT    NOT NULL CHECK (length(idempotency_key) BETWEEN 1 AND 255),
  request_hash    BLOB    NOT NULL CHECK (length(request_hash) = 32), -- method, path and validated body
  status_code     INTEGER NOT NULL CHECK (status_code BETWEEN 200 AND 299),
  location        TEXT,
  body            TEXT    NOT NULL,
  created_at      INTEGER NOT NULL,
  UNIQUE (key_id, idempotency_key)
) STRICT;
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at); -- for retention
