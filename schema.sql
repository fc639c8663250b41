-- davit's one file. Read this first: everything the service knows is in these tables.
--
-- Times are milliseconds since 1970, durations milliseconds, both INTEGER. Ids are the text that people
-- see. `seq` is the order in which rows came to be: lists walk it, and it never changes or comes back.
-- A rule that can be held here is held here; code that breaks one fails loudly.
--
-- A choice of more than two words is written with OR: for IN (...) SQLite makes a table of the words each time that it
-- looks at the rule, and a new deployment has eight such to keep. It took 80 µs, and 69 like this.
--
-- Once a version is released its schema changes no more: what changes is the next one, by a step in
-- src/store/migrations.ts, which says how.

PRAGMA application_id = 1684108916; -- 'davt'
PRAGMA user_version = 2;

-- One row: what belongs to the file as a whole.
CREATE TABLE instance (
  only_row        INTEGER PRIMARY KEY CHECK (only_row = 1),
  created_at      INTEGER NOT NULL,
  probes          INTEGER NOT NULL DEFAULT 0, -- counted up to see whether the disk takes a write
  webhook_changes INTEGER NOT NULL DEFAULT 0, -- counted up by the triggers below webhook_secrets
  cursor_secret   BLOB    NOT NULL CHECK (length(cursor_secret) = 32), -- authenticates page cursors, also after a restore
  davit_version   TEXT    NOT NULL -- the davit that made the schema what it is: an older one that refuses the file names it
) STRICT;

-- How the machine's clock was set while davit ran, the latest hundred times: a restart must not believe in time that
-- never passed.
CREATE TABLE clock_settings (
  seq   INTEGER PRIMARY KEY AUTOINCREMENT,
  at    INTEGER NOT NULL, -- what the clock said just after
  by_ms INTEGER NOT NULL  -- ahead, or back if it is negative
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

-- The secrets of a key: one, or two while a rotation overlaps. Only the SHA-256 is kept: a secret has
-- 256 random bits, so a slow hash would protect nothing more.
CREATE TABLE key_secrets (
  hash       BLOB    NOT NULL PRIMARY KEY CHECK (length(hash) = 32),
  key_id     TEXT    NOT NULL REFERENCES keys (id),
  last4      TEXT    NOT NULL CHECK (length(last4) = 4),
  created_at INTEGER NOT NULL,
  expires_at INTEGER -- set when a newer one took over
) STRICT, WITHOUT ROWID;
CREATE INDEX key_secrets_of_key ON key_secrets (key_id);

CREATE TABLE projects (
  seq               INTEGER PRIMARY KEY AUTOINCREMENT,
  id                TEXT    NOT NULL UNIQUE CHECK (id GLOB 'prj_*'),
  name              TEXT    NOT NULL CHECK (name <> ''),
  status            TEXT    NOT NULL CHECK (status = 'active' OR status = 'paused' OR status = 'archived'),
  created_at        INTEGER NOT NULL,
  command           TEXT    CHECK (json_type(command) = 'array'), -- argument vector; null: reported from outside
  directory         TEXT    CHECK (directory GLOB '/*'),          -- where the command runs; null: a directory made for each run
  timeout_ms        INTEGER CHECK (timeout_ms > 0),               -- null: no limit
  idle_timeout_ms   INTEGER CHECK (idle_timeout_ms > 0),          -- null: no limit
  report_timeout_ms INTEGER CHECK (report_timeout_ms > 0),        -- null: a reported deployment may stay open for ever
  policy            TEXT    NOT NULL CHECK (policy IN ('queue', 'latest')),
  -- Both are kept by the triggers below deployments, so that neither creating a deployment nor choosing
  -- the next project has to count a queue.
  queued_count      INTEGER NOT NULL DEFAULT 0 CHECK (queued_count >= 0), -- deployments that wait for the executor
  last_started_at   INTEGER NOT NULL DEFAULT 0                           -- projects take turns: the longest ago is next
) STRICT;
CREATE INDEX projects_waiting ON projects (last_started_at, seq) WHERE queued_count > 0 AND status = 'active';

-- The command's own environment. Values are secrets as a rule: nothing prints them.
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
-- Who sees a project, so that an event finds its webhooks without looking at all others.
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
  redeploy_of        TEXT    CHECK (redeploy_of GLOB 'dpl_*'),   -- no foreign keys: either may be pruned first
  superseded_by      TEXT    CHECK (superseded_by GLOB 'dpl_*'),
  created_at         INTEGER NOT NULL,
  started_at         INTEGER,
  finished_at        INTEGER,
  report_due_at      INTEGER, -- when a reported one becomes failed, report_timeout
  exit_code          INTEGER,
  signal             TEXT,
  outputs            TEXT    NOT NULL DEFAULT '{}' CHECK (json_type(outputs) = 'object'),
  log_bytes          INTEGER NOT NULL DEFAULT 0, -- all that was printed
  log_truncated      INTEGER NOT NULL DEFAULT 0 CHECK (log_truncated IN (0, 1)),
  -- Which process it is. All three together name one for ever; a process id alone is reused.
  process_id         INTEGER,
  process_started_at INTEGER, -- field 22 of /proc/<pid>/stat: clock ticks since boot
  boot_id            TEXT,    -- /proc/sys/kernel/random/boot_id
  CHECK ((finished_at IS NOT NULL) = (status = 'succeeded' OR status = 'failed' OR status = 'canceled')),
  CHECK (status <> 'queued' OR started_at IS NULL),
  CHECK (status NOT IN ('running', 'canceling') OR started_at IS NOT NULL),
  CHECK (status <> 'failed' OR reason IS NOT NULL)
) STRICT;
CREATE INDEX deployments_of_project ON deployments (project_id, seq);
CREATE INDEX deployments_unfinished ON deployments (seq) WHERE finished_at IS NULL; -- what is queued and running now
CREATE INDEX deployments_queued ON deployments (project_id, seq) WHERE status = 'queued' AND reported = 0;
CREATE UNIQUE INDEX one_running_deployment_per_project ON deployments (project_id)
  WHERE status IN ('running', 'canceling') AND reported = 0;
CREATE INDEX deployments_open_reports ON deployments (report_due_at)
  WHERE reported = 1 AND finished_at IS NULL AND report_due_at IS NOT NULL;
-- What DEPLOY_PREVIOUS_REF is read from, however many failed since.
CREATE INDEX deployments_succeeded ON deployments (project_id, seq) WHERE status = 'succeeded';
CREATE INDEX deployments_finished ON deployments (finished_at) WHERE finished_at IS NOT NULL; -- for retention

CREATE TRIGGER deployment_joins_queue AFTER INSERT ON deployments
WHEN NEW.status = 'queued' AND NEW.reported = 0
BEGIN
  UPDATE projects SET queued_count = queued_count + 1 WHERE id = NEW.project_id;
END;

CREATE TRIGGER deployment_leaves_queue AFTER UPDATE OF status ON deployments
WHEN OLD.status = 'queued' AND NEW.status <> 'queued' AND OLD.reported = 0
BEGIN
  UPDATE projects
     SET queued_count = queued_count - 1,
         last_started_at = CASE NEW.status WHEN 'running' THEN NEW.started_at ELSE last_started_at END
   WHERE id = NEW.project_id;
END;

-- A terminal state is for ever, whoever asks.
CREATE TRIGGER deployment_end_is_final BEFORE UPDATE OF status ON deployments
WHEN OLD.finished_at IS NOT NULL AND NEW.status <> OLD.status
BEGIN
  SELECT RAISE(ABORT, 'a finished deployment changes no more');
END;

-- What commands printed: the first 256 KiB and the last 5 MiB, in pieces. `start` counts the bytes that
-- were printed before; a gap between two pieces is what was left out.
CREATE TABLE log_chunks (
  deployment_id TEXT    NOT NULL REFERENCES deployments (id),
  start         INTEGER NOT NULL CHECK (start >= 0),
  bytes         BLOB    NOT NULL CHECK (length(bytes) > 0),
  UNIQUE (deployment_id, start)
) STRICT;

-- What happened. `payload` is serialised once; every delivery sends these very bytes.
CREATE TABLE events (
  seq           INTEGER PRIMARY KEY AUTOINCREMENT,
  id            TEXT    NOT NULL UNIQUE CHECK (id GLOB 'evt_*'),
  type          TEXT    NOT NULL CHECK (type = 'deployment.succeeded' OR type = 'deployment.failed' OR type = 'deployment.created'
                                  OR type = 'deployment.started' OR type = 'deployment.canceled'),
  deployment_id TEXT    NOT NULL, -- no foreign keys: the event outlives what it tells of
  project_id    TEXT    NOT NULL,
  created_at    INTEGER NOT NULL,
  payload       TEXT    NOT NULL
) STRICT;
CREATE INDEX events_by_age ON events (created_at); -- for retention
-- However often a process dies: one end per deployment, and one event that tells of it.
CREATE UNIQUE INDEX one_terminal_event_per_deployment ON events (deployment_id)
  WHERE type = 'deployment.succeeded' OR type = 'deployment.failed' OR type = 'deployment.canceled';

CREATE TABLE webhooks (
  seq                  INTEGER PRIMARY KEY AUTOINCREMENT,
  id                   TEXT    NOT NULL UNIQUE CHECK (id GLOB 'whk_*'),
  key_id               TEXT    NOT NULL REFERENCES keys (id), -- who registered it, sees it, and whose projects it tells of
  url                  TEXT    NOT NULL,                      -- normalised by WHATWG URL: what is judged is what is sent to
  events               TEXT    NOT NULL CHECK (json_type(events) = 'array'),
  description          TEXT,
  status               TEXT    NOT NULL CHECK (status IN ('enabled', 'disabled')),
  status_reason        TEXT,
  created_at           INTEGER NOT NULL,
  enabled_at           INTEGER NOT NULL, -- when it last became enabled: what was held till then begins its ladder here
  last_success_at      INTEGER,
  last_failure_at      INTEGER,
  failing_since        INTEGER, -- first failure after the last success
  consecutive_failures INTEGER NOT NULL DEFAULT 0,
  deleted_at           INTEGER  -- gone for everyone; its deliveries are pruned in small steps
) STRICT;
CREATE INDEX webhooks_of_key ON webhooks (key_id, seq) WHERE deleted_at IS NULL;

-- Who is told of what: one row for each type that a webhook subscribes to, gone when it is deleted.
CREATE TABLE webhook_subscriptions (
  event_type TEXT NOT NULL,
  webhook_id TEXT NOT NULL REFERENCES webhooks (id),
  PRIMARY KEY (event_type, webhook_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX webhook_subscriptions_of_webhook ON webhook_subscriptions (webhook_id);

-- The signing secrets of a webhook: one, or more while a rotation overlaps. In clear, as signing needs them.
CREATE TABLE webhook_secrets (
  webhook_id TEXT    NOT NULL REFERENCES webhooks (id),
  secret     TEXT    NOT NULL,
  created_at INTEGER NOT NULL,
  expires_at INTEGER, -- null for the newest
  PRIMARY KEY (webhook_id, secret)
) STRICT, WITHOUT ROWID;

-- Whoever remembers where and how to send sees here that it has changed.
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

-- The outbox: one row for each event and each webhook that is told of it.
CREATE TABLE deliveries (
  seq              INTEGER PRIMARY KEY AUTOINCREMENT,
  id               TEXT    NOT NULL UNIQUE CHECK (id GLOB 'dlv_*'),
  event_id         TEXT    NOT NULL REFERENCES events (id),
  event_type       TEXT    NOT NULL,
  webhook_id       TEXT    NOT NULL REFERENCES webhooks (id),
  -- A pending one of a disabled webhook is shown as held: so disabling and enabling are one row's change,
  -- however much is waiting.
  status           TEXT    NOT NULL CHECK (status = 'pending' OR status = 'delivered' OR status = 'exhausted'),
  attempt_count    INTEGER NOT NULL DEFAULT 0,
  next_attempt_at  INTEGER, -- for pending ones
  created_at       INTEGER NOT NULL,
  delivered_at     INTEGER,
  -- The retry ladder that it stands on: the first begins with the event, a redelivery begins another.
  ladder_started_at INTEGER NOT NULL,
  ladder_attempts  INTEGER NOT NULL DEFAULT 0,
  ladder_trigger   TEXT    NOT NULL CHECK (ladder_trigger = 'schedule' OR ladder_trigger = 'redeliver'
                                        OR ladder_trigger = 'replay'),
  CHECK ((status = 'pending') = (next_attempt_at IS NOT NULL)),
  CHECK (status <> 'delivered' OR delivered_at IS NOT NULL)
) STRICT;
-- What is due, one webhook beside the other: a claim skips from webhook to webhook, so that its cost does not
-- grow with the backlog of any of them.
CREATE INDEX deliveries_pending ON deliveries (webhook_id, next_attempt_at, seq) WHERE status = 'pending';
CREATE INDEX deliveries_of_webhook ON deliveries (webhook_id, seq);
CREATE INDEX deliveries_of_event ON deliveries (event_id);

-- Every time that davit knocked at a receiver's door.
CREATE TABLE attempts (
  delivery_id    TEXT    NOT NULL REFERENCES deliveries (id),
  number         INTEGER NOT NULL CHECK (number >= 1),
  at             INTEGER NOT NULL,
  status_code    INTEGER,
  error          TEXT,
  duration_ms    INTEGER NOT NULL,
  remote_address TEXT,
  response_body  TEXT, -- at most 4 KiB of it
  trigger        TEXT    NOT NULL CHECK (trigger = 'schedule' OR trigger = 'redeliver' OR trigger = 'replay'),
  UNIQUE (delivery_id, number)
) STRICT;

-- Replays of a webhook's past, worked off in small steps; a restart goes on at `done_seq`.
CREATE TABLE replays (
  seq             INTEGER PRIMARY KEY AUTOINCREMENT,
  webhook_id      TEXT    NOT NULL REFERENCES webhooks (id),
  since           INTEGER NOT NULL,
  until           INTEGER NOT NULL,
  delivery_status TEXT    CHECK (delivery_status = 'pending' OR delivery_status = 'delivered'
                                       OR delivery_status = 'exhausted'), -- null: whatever it is
  last_seq        INTEGER NOT NULL, -- the last delivery that there was when it was asked for
  done_seq        INTEGER NOT NULL DEFAULT 0, -- deliveries up to this one are on their new ladder
  created_at      INTEGER NOT NULL,
  finished_at     INTEGER
) STRICT;
CREATE INDEX replays_open ON replays (webhook_id) WHERE finished_at IS NULL;

-- The answers to writes that carried an Idempotency-Key, byte for byte.
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
