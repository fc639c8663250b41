import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { truncateSync, writeFileSync } from 'node:fs';
import Sqlite from 'better-sqlite3';
import t from 'tap';
import { HOUR_MS } from '../../src/durations.ts';
import { realEffects } from '../../src/effects.ts';
import { processIdentity } from '../../src/process-identity.ts';
import { openForWriting } from '../../src/store/database.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { WAL_LARGE_BYTES } from '../../src/store/wal.ts';
import { busyWriter } from '../helpers/busy.ts';
import { COMPILE_CACHE, MAIN } from '../helpers/cli.ts';
import { newDeploymentId } from '../helpers/commands.ts';
import { findingOf, reportOf, withProject } from '../helpers/doctor.ts';
import { changeFile } from '../helpers/files.ts';
import { startProcess } from '../helpers/marked-processes.ts';
import { ifMayUnshare, OWN_PROCESSES } from '../helpers/namespaces.ts';
import { serve } from '../helpers/served.ts';

const nowMs = realEffects.now();

t.test('doctor names each problem and what to do about it', async (t) => {
  const hourAgo = nowMs - HOUR_MS;
  const deployment = (status: string, at: string) => `
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at, process_id, process_started_at, boot_id)
    SELECT 'dpl_1', id, 'main', '${status}', 0, 'api', ${hourAgo}, ${at}, 1, 1, 'b' FROM projects`;
  const webhook = (columns: string, values: string) => `
    INSERT INTO webhooks (id, key_id, url, events, created_at, enabled_at, ${columns})
    SELECT 'whk_1', id, 'https://example.com/', '[]', 1, 1, ${values} FROM keys;`;
  const delivery = `
    INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
    VALUES ('evt_1', 'deployment.created', 'dpl_1', 'prj_1', 1, '{}');
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at, ladder_started_at, ladder_trigger)
    VALUES ('dlv_1', 'evt_1', 'deployment.created', 'whk_1', 'pending', ${hourAgo}, 1, 1, 'schedule')`;
  const cases: [what: string, sql: string, check: string, message: RegExp, advice: RegExp][] = [
    [
      'a running deployment without a service',
      deployment('running', '1'),
      'deployments',
      /^dpl_1 is recorded as running, but no service is running$/,
      /^davit serve: it ends what is left.* interrupted$/,
    ],
    [
      'a deployment that was being canceled when the service ended',
      deployment('canceling', '1'),
      'deployments',
      /^dpl_1 is recorded as running, but no service is running$/,
      /^davit serve: it ends what is left.* canceled$/,
    ],
    [
      'a queued deployment without a service',
      `${deployment('queued', 'NULL')}; UPDATE projects SET queued_count = 1`,
      'deployments',
      /^1 wait, but no service is running$/,
      /^davit serve$/,
    ],
    [
      'a webhook that fails',
      webhook('status, failing_since, consecutive_failures', `'enabled', ${hourAgo - HOUR_MS}, 7`),
      'webhooks',
      /^whk_1 has been failing since 20\S+Z, 7 times in a row$/,
      /davit admin webhook ping whk_1/,
    ],
    [
      'a webhook that is disabled while deliveries are held',
      webhook('status, status_reason', "'disabled', 'the receiver answered 410 Gone'") + delivery,
      'webhooks',
      /^whk_1 is disabled \(the receiver answered 410 Gone\), with 1 delivery held for it$/,
      /davit admin webhook enable whk_1/,
    ],
    [
      'a disabled webhook of a revoked key',
      `UPDATE keys SET revoked_at = 1;${webhook('status', "'disabled'")}${delivery}`,
      'webhooks',
      /^whk_1 is disabled, with 1 delivery held for it$/,
      /^davit admin webhook delete whk_1: its key is revoked, so it stays disabled$/,
    ],
    [
      'a webhook whose key has expired',
      `UPDATE keys SET expires_at = ${nowMs - 1};${webhook('status', "'enabled'")}`,
      'webhooks',
      /^whk_1 gets no new events: its key ci \(key_\w+\) expired at 20\S+Z$/,
      /^register it again with another key, then davit admin webhook delete whk_1$/,
    ],
    [
      'deliveries that are long overdue, of a webhook that failed when the service ended',
      webhook('status, failing_since', `'enabled', ${hourAgo + HOUR_MS / 2}`) + delivery,
      'webhooks',
      /^whk_1 is behind with 1 delivery, the first due since 20\S+Z$/,
      /^davit serve$/,
    ],
    [
      'a clock that was ahead',
      `UPDATE projects SET created_at = ${nowMs + 26 * HOUR_MS}`,
      'clock',
      /^the newest entry is of 20\S+Z, which is 1d1h\w+ in the future$/,
      /timedatectl/,
    ],
    [
      'a key that ends soon',
      `UPDATE keys SET created_at = 1, expires_at = ${nowMs + 48 * HOUR_MS}`,
      'keys',
      /^key ci \(key_\w+\) expires at 20\S+Z$/,
      /davit admin key create/,
    ],
    [
      'a command that is not there',
      `UPDATE projects SET command = '["/nowhere/release.sh"]'`,
      'projects',
      /^project website \(prj_\w+\): .*\/nowhere\/release\.sh/,
      /./,
    ],
    [
      'a count that is wrong',
      'UPDATE projects SET queued_count = 3',
      'references',
      /^prj_\w+ counts 3 waiting deployments, but 0 wait$/,
      /restore the last backup/,
    ],
    [
      'a row that refers to nothing',
      "INSERT INTO key_projects VALUES ('key_2', 'prj_2')",
      'references',
      /^1 of key_projects refer to (?:keys|projects) that are not there$/,
      /restore the last backup/,
    ],
    [
      'an index that is not there',
      'DROP INDEX one_terminal_event_per_deployment',
      'integrity',
      /^the index one_terminal_event_per_deployment is missing$/,
      /restore the last backup/,
    ],
    [
      'a row that every file has',
      'DELETE FROM instance',
      'integrity',
      /^the row of the table instance is missing$/,
      /restore the last backup/,
    ],
  ];
  for (const [what, sql, check, message, advice] of cases) {
    const there = await withProject(t);
    changeFile(there.dbPath, sql);
    const found = findingOf(await reportOf(t, there, 1), check);
    t.match(found, { level: 'problem', message, advice }, what);
  }
});

t.test('doctor tells healthy states, notes and problems apart', async (t) => {
  const own = processIdentity(process.pid);
  if (own === undefined) throw new Error('this process is not to be seen');
  const living = `${own.processId}, ${own.processStartedAt}, '${own.bootId}'`;
  const gone = "1, 1, 'another boot'";
  const hourAgo = nowMs - HOUR_MS;
  const dayAgo = nowMs - 24 * HOUR_MS;
  const fiveMinutesAgo = nowMs - 300_000;
  const elsewhere = 4_194_305; // no process has this id
  const deployment = (id: string, status: string, at: number, process = 'NULL, NULL, NULL') => `
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at, process_id, process_started_at, boot_id)
    SELECT '${id}', id, 'main', '${status}', 0, 'api', ${at}, ${status === 'queued' ? 'NULL' : at}, ${process} FROM projects;
    UPDATE projects SET queued_count = queued_count + ${status === 'queued' ? 1 : 0};`;
  const reported = (id: string, at: number, reportDueAt: number | 'NULL' = 'NULL') => `
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, report_due_at)
    SELECT '${id}', id, 'main', 'queued', 1, 'api', ${at}, ${reportDueAt} FROM projects;`;
  const webhook = (id: string, status: string, failingSince: number | 'NULL' = 'NULL') => `
    INSERT INTO webhooks (id, key_id, url, events, created_at, enabled_at, status, failing_since, consecutive_failures)
    SELECT '${id}', id, 'https://example.com/', '[]', 1, 1, '${status}', ${failingSince}, 88 FROM keys;`;
  const delivery = (nextAttemptAt: number) => `
    INSERT INTO events (id, type, deployment_id, project_id, created_at, payload)
    VALUES ('evt_1', 'deployment.created', 'dpl_1', 'prj_1', 1, '{}');
    INSERT INTO deliveries (id, event_id, event_type, webhook_id, status, next_attempt_at, created_at, ladder_started_at, ladder_trigger)
    VALUES ('dlv_1', 'evt_1', 'deployment.created', 'whk_1', 'pending', ${nextAttemptAt}, 1, 1, 'schedule');`;
  const reason = (text: string) => `UPDATE webhooks SET status_reason = '${text}';`;
  const refusal = `
    UPDATE deliveries SET attempt_count = 1;
    INSERT INTO attempts VALUES ('dlv_1', 1, 1, NULL, 'connection_refused', 1, NULL, NULL, 'schedule');`;
  const keyEnds = (at: number, lifeMs = 90 * 24 * HOUR_MS) =>
    `UPDATE keys SET created_at = ${at - lifeMs}, expires_at = ${at};`;
  const none = null;
  const cases: [
    sql: string,
    servedBy: number | null,
    check: string,
    level: string,
    message: RegExp,
    advice?: RegExp,
  ][] = [
    [
      deployment('dpl_1', 'running', hourAgo, living),
      none,
      'deployments',
      'problem',
      /^dpl_1 runs as process \d+, but no service is running$/,
    ],
    [deployment('dpl_1', 'running', hourAgo, living), own.processId, 'deployments', 'ok', /^1 running, 0/],
    [deployment('dpl_1', 'running', nowMs, gone), own.processId, 'deployments', 'ok', /^1 running/],
    [deployment('dpl_1', 'running', hourAgo, gone), elsewhere, 'deployments', 'ok', /^1 running/],
    [
      deployment('dpl_1', 'queued', hourAgo),
      own.processId,
      'deployments',
      'problem',
      /^dpl_1 has been waiting since 20\S+Z, though nothing runs$/,
    ],
    [deployment('dpl_1', 'queued', fiveMinutesAgo), own.processId, 'deployments', 'ok', /^0 running, 1/],
    [
      deployment('dpl_1', 'running', hourAgo, living) + deployment('dpl_2', 'queued', hourAgo),
      own.processId,
      'deployments',
      'ok',
      /^1 running, 1 waiting$/,
    ],
    [
      `UPDATE projects SET status = 'paused';${deployment('dpl_1', 'queued', hourAgo)}`,
      none,
      'deployments',
      'note',
      /^1 wait in paused projects$/,
    ],
    [
      reported('dpl_1', hourAgo) + reported('dpl_2', dayAgo, nowMs + 1_000),
      none,
      'deployments',
      'ok',
      /^0 running, 0 waiting, 2 carried out by other systems$/,
    ],
    [
      reported('dpl_1', hourAgo) + reported('dpl_2', dayAgo),
      none,
      'deployments',
      'note',
      /^1 of another system, a day old or of archived projects, may stay open for ever$/,
    ],
    [
      `UPDATE projects SET status = 'archived';${reported('dpl_1', hourAgo)}`,
      none,
      'deployments',
      'note',
      /^1 of another system, .*archived/,
    ],
    [
      webhook('whk_1', 'enabled', nowMs - 600_000) + webhook('whk_2', 'enabled'),
      none,
      'webhooks',
      'note',
      /^1 of 2 failing, for less than 1h$/,
    ],
    [webhook('whk_1', 'disabled', nowMs - 600_000), none, 'webhooks', 'note', /^whk_1 is disabled$/],
    [
      webhook('whk_1', 'disabled') + delivery(hourAgo) + reason('disabled by the administrator'),
      none,
      'webhooks',
      'note',
      /^whk_1 is disabled \(disabled by the administrator\), with 1 delivery held for it$/,
      /^davit admin webhook enable whk_1; or davit admin webhook delete whk_1$/,
    ],
    [
      webhook('whk_1', 'disabled') + delivery(hourAgo) + reason('disabled through the API'),
      none,
      'webhooks',
      'note',
      /^whk_1 is disabled \(disabled through the API\), with 1 delivery held for it$/,
    ],
    [
      webhook('whk_1', 'disabled') + delivery(hourAgo) + reason('every delivery failed for 5 days'),
      none,
      'webhooks',
      'problem',
      /^whk_1 is disabled \(every delivery failed for 5 days\), with 1 delivery held for it$/,
      /^fix the receiver, then davit admin webhook enable whk_1; or /,
    ],
    [keyEnds(nowMs - 1) + webhook('whk_1', 'disabled'), none, 'webhooks', 'note', /^whk_1 is disabled$/],
    [
      keyEnds(nowMs + 15 * 24 * HOUR_MS) + webhook('whk_1', 'enabled'),
      none,
      'webhooks',
      'ok',
      /^1 of them, none/,
    ],
    [
      webhook('whk_1', 'enabled', hourAgo - 1_000),
      none,
      'webhooks',
      'problem',
      /^whk_1 has been failing since/,
    ],
    [webhook('whk_1', 'enabled') + delivery(fiveMinutesAgo), none, 'webhooks', 'ok', /^1 of them, none/],
    [
      webhook('whk_1', 'enabled') + delivery(hourAgo),
      own.processId,
      'webhooks',
      'problem',
      /^whk_1 is behind/,
      /^its receiver is too slow for its events, or davit serve needs a restart$/,
    ],
    [
      webhook('whk_1', 'enabled', nowMs - 1_800_000) + delivery(hourAgo) + refusal,
      own.processId,
      'webhooks',
      'problem',
      /^whk_1 has been failing since 20\S+Z, 88 times in a row, last with connection_refused$/,
    ],
    [
      webhook('whk_1', 'enabled', nowMs - 1_800_000) + delivery(fiveMinutesAgo),
      own.processId,
      'webhooks',
      'note',
      /^1 of 1 failing, for less than 1h$/,
    ],
    [
      `UPDATE projects SET status = 'archived', command = '["/nowhere/release.sh"]'`,
      none,
      'projects',
      'ok',
      /^0 of them$/,
    ],
    ['UPDATE projects SET command = NULL, report_timeout_ms = 1', none, 'projects', 'ok', /^1 of them$/],
    [
      "INSERT INTO project_variables SELECT id, 'HOME', '/nowhere' FROM projects",
      none,
      'projects',
      'ok',
      /^1 of them, each command can be started$/,
    ],
    ['', none, 'keys', 'ok', /^1 of them, none expires soon$/],
    [keyEnds(nowMs - 1), none, 'keys', 'note', /^key ci \(key_\w+\) expired at 20\S+Z$/],
    [keyEnds(nowMs - 15 * 24 * HOUR_MS), none, 'keys', 'ok', /^0 of them, none expires soon$/],
    [`UPDATE keys SET revoked_at = 1;${keyEnds(nowMs - 1)}`, none, 'keys', 'ok', /^0 of them/],
    [keyEnds(nowMs + 13 * 24 * HOUR_MS), none, 'keys', 'problem', /^key ci \(key_\w+\) expires at 20\S+Z$/],
    [keyEnds(nowMs + 15 * 24 * HOUR_MS), none, 'keys', 'ok', /^1 of them/],
    [keyEnds(nowMs + HOUR_MS, 3 * HOUR_MS), none, 'keys', 'ok', /^1 of them, none expires soon$/],
    [
      keyEnds(nowMs + HOUR_MS, 5 * HOUR_MS),
      none,
      'keys',
      'problem',
      /^key ci \(key_\w+\) expires at 20\S+Z$/,
    ],
    [`UPDATE keys SET revoked_at = 1;${keyEnds(nowMs + HOUR_MS)}`, none, 'keys', 'ok', /^0 of them/],
  ];
  for (const [sql, servedBy, check, level, message, advice = /^/] of cases) {
    const there = await withProject(t);
    changeFile(there.dbPath, sql);
    const release = servedBy === null ? () => {} : servedSince(there.dbPath, hourAgo - HOUR_MS, servedBy);
    const { findings } = await reportOf(t, there, level === 'problem' ? 1 : 0);
    release();
    const found = findings.filter((finding) => finding.check === check);
    t.match(found, [{ level, message }], String(message));
    t.equal(found.length, 1, String(message));
    t.equal(found[0]?.advice === null, level === 'ok' || /disabled\$/.test(String(message)));
    t.match(found[0]?.advice ?? '', advice);
  }
});

t.test('doctor says of an expired key how to replace it, and how to be told of it no more', async (t) => {
  const there = await withProject(t);
  changeFile(there.dbPath, `UPDATE keys SET expires_at = ${Date.now() - 1}`);
  const found = async () => (await reportOf(t, there, 0)).findings.find(({ check }) => check === 'keys');
  const [, id] = /\((key_\w+)\) expired/.exec((await found())?.message ?? '') ?? [];
  t.equal(
    (await found())?.advice,
    `replace it if somebody still needs it: davit admin key create; if not, davit admin key revoke ${id}`,
  );
  changeFile(there.dbPath, 'UPDATE keys SET revoked_at = 1');
  t.match(await found(), { level: 'ok' });
});

t.test('doctor reports a deployment that is stuck in a running service', async (t) => {
  const there = await withProject(t);
  changeFile(
    there.dbPath,
    `UPDATE projects SET status = 'paused', queued_count = 1;
     INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at)
     SELECT 'dpl_1', id, 'main', 'queued', 0, 'api', ${nowMs - HOUR_MS} FROM projects`,
  );
  const service = await serve(t, there.directory);
  t.match(findingOf(await reportOf(t, there, 0), 'deployments'), {
    level: 'note',
    message: '1 wait in paused projects',
  });
  await service.kill();
  // As if the end of its command had been missed.
  const release = servedSince(there.dbPath, nowMs - 2 * HOUR_MS);
  changeFile(
    there.dbPath,
    `UPDATE deployments
        SET status = 'running', started_at = ${nowMs - HOUR_MS}, process_id = 1, process_started_at = 1, boot_id = 'b'`,
  );
  t.match(findingOf(await reportOf(t, there, 1), 'deployments'), {
    level: 'problem',
    message: /^dpl_1 is recorded as running, but its process is gone$/,
    advice: 'restart davit serve',
  });
  release();
});

t.test('a deployment that has no process yet waits to start: no restart would help it', async (t) => {
  const there = await withProject(t);
  const since = new Date(nowMs - HOUR_MS).toISOString();
  changeFile(
    there.dbPath,
    `INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at)
     SELECT 'dpl_1', id, 'main', 'running', 0, 'api', ${nowMs - HOUR_MS}, ${nowMs - HOUR_MS} FROM projects`,
  );
  const release = servedSince(there.dbPath, nowMs - 2 * HOUR_MS);
  t.match(findingOf(await reportOf(t, there, 1), 'deployments'), {
    level: 'problem',
    message: `dpl_1 has been waiting since ${since}, and its command could not be started`,
    advice: 'see its log: davit admin deployment logs dpl_1',
  });
  release();
});

t.test('a deployment is not stuck while processes that its first one left are being stopped', async (t) => {
  const there = await withProject(t);
  const id = newDeploymentId();
  changeFile(
    there.dbPath,
    `INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at, process_id, process_started_at, boot_id)
     SELECT '${id}', id, 'main', 'canceling', 0, 'api', ${nowMs - HOUR_MS}, ${nowMs - HOUR_MS}, 1, 1, 'b' FROM projects`,
  );
  const release = servedSince(there.dbPath, nowMs - 2 * HOUR_MS);
  const { child } = await startProcess(t, ['sleep', '600'], id);
  t.match(findingOf(await reportOf(t, there, 0), 'deployments'), { level: 'ok', message: /^1 running/ });
  child.kill('SIGKILL');
  await once(child, 'close');
  t.match(findingOf(await reportOf(t, there, 1), 'deployments'), {
    message: `${id} is recorded as running, but its process is gone`,
  });
  release();
});

t.test('doctor names the processes that keep an earlier run of the service from being over', async (t) => {
  const there = await withProject(t);
  const id = newDeploymentId();
  const { child, identity } = await startProcess(t, ['sleep', '600'], id);
  changeFile(
    there.dbPath,
    `INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at, process_id, process_started_at, boot_id)
     SELECT '${id}', id, 'main', 'running', 0, 'api', ${nowMs - 2 * HOUR_MS}, ${nowMs - 2 * HOUR_MS}, 1, 1, '${identity.bootId}' FROM projects`,
  );
  const foundSince = async (sinceMs: number, exitCode: number, serviceId = process.pid) => {
    const release = servedSince(there.dbPath, sinceMs, serviceId);
    const found = findingOf(await reportOf(t, there, exitCode), 'deployments');
    release();
    return found;
  };
  const left = `${id}, which an earlier run of the service left, has not ended: until it has, no deployment starts`;
  t.match(await foundSince(realEffects.now(), 0), { level: 'ok' }, 'it is being ended');
  t.match(await foundSince(nowMs + HOUR_MS, 0), { level: 'ok' }, 'the clock was set back');
  t.match(await foundSince(nowMs - HOUR_MS, 1), {
    level: 'problem',
    message: left,
    advice: `end what is left of it, as root or its user: kill -9 ${identity.processId}`,
  });
  const unknown = { message: left, advice: /^the log of davit serve says/ };
  t.match(
    await foundSince(nowMs - HOUR_MS, 1, 4_194_305),
    unknown,
    'it may be of a service that is not visible',
  );
  child.kill('SIGKILL');
  await once(child, 'close');
  t.match(await foundSince(nowMs - HOUR_MS, 1), unknown);

  const older = processIdentity(process.ppid);
  changeFile(
    there.dbPath,
    `UPDATE deployments SET process_id = ${process.ppid}, process_started_at = ${older?.processStartedAt}`,
  );
  t.match(
    await foundSince(nowMs - HOUR_MS, 1),
    { message: left, advice: `end what is left of it, as root or its user: kill -9 ${process.ppid}` },
    'the one that is recorded, though it shows no deployment',
  );
});

t.test(
  'doctor takes no command of the service for that of an earlier run, however its clock was set',
  async (t) => {
    const there = await withProject(t);
    const { identity } = await startProcess(t, ['sleep', '600']);
    const { processId, processStartedAt, bootId } = identity;
    changeFile(
      there.dbPath,
      `INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at, process_id, process_started_at, boot_id)
     SELECT 'dpl_1', id, 'main', 'running', 0, 'api', ${nowMs - 2 * HOUR_MS}, ${nowMs - 2 * HOUR_MS}, ${processId}, ${processStartedAt}, '${bootId}' FROM projects`,
    );
    const release = servedSince(there.dbPath, nowMs - HOUR_MS);
    t.match(findingOf(await reportOf(t, there, 0), 'deployments'), { level: 'ok' });
    release();
  },
);

t.test('a deployment that waits to start in a paused project is a note', async (t) => {
  const there = await withProject(t);
  changeFile(
    there.dbPath,
    `INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at)
     SELECT 'dpl_1', id, 'main', 'running', 0, 'api', ${nowMs - HOUR_MS}, ${nowMs - HOUR_MS} FROM projects;
     UPDATE projects SET status = 'paused'`,
  );
  const release = servedSince(there.dbPath, nowMs - 2 * HOUR_MS);
  t.match(findingOf(await reportOf(t, there, 0), 'deployments'), {
    level: 'note',
    message: 'dpl_1 waits to start, as its project is paused',
    advice: 'davit admin project resume <project>; davit admin queue shows which one',
  });
  release();
});

t.test(
  'doctor makes no claim about the commands of a service in another PID namespace',
  ifMayUnshare,
  async (t) => {
    const there = await withProject(t);
    const words = [...OWN_PROCESSES, process.execPath, MAIN, 'serve', '--listen', '127.0.0.1:0'];
    const service = spawn('unshare', words, {
      cwd: there.directory,
      env: { ...COMPILE_CACHE, PATH: '/usr/bin:/bin' },
      stdio: ['ignore', 'pipe', 'ignore'],
    });
    t.teardown(() => service.kill('SIGKILL'));
    await once(service.stdout, 'data');
    changeFile(
      there.dbPath,
      `INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, started_at)
     SELECT 'dpl_1', id, 'main', 'running', 0, 'api', ${nowMs - HOUR_MS}, ${nowMs - HOUR_MS} FROM projects`,
    );
    t.match(findingOf(await reportOf(t, there, 0), 'deployments'), {
      level: 'ok',
      message: '1 running, 0 waiting',
    });
    service.kill('SIGKILL');
    await once(service, 'close');
  },
);

t.test('a large WAL is a problem, with advice on how to shrink it', async (t) => {
  const there = await withProject(t);
  const grow = (bytes: number) => {
    writeFileSync(`${there.dbPath}-wal`, '', { mode: 0o600 });
    truncateSync(`${there.dbPath}-wal`, bytes);
  };
  grow(WAL_LARGE_BYTES);
  t.match(findingOf(await reportOf(t, there, 0), 'wal'), { level: 'note' });
  grow(WAL_LARGE_BYTES + 1);
  t.match(findingOf(await reportOf(t, there, 1), 'wal'), {
    level: 'problem',
    message: /^the WAL has [\d.]+ MB$/,
    advice: /^start davit serve and stop it again/,
  });
  const release = lockForServing(there.dbPath, process.pid, realEffects);
  grow(4_096);
  t.match(
    findingOf(await reportOf(t, there, 0), 'wal'),
    { level: 'ok' },
    'with a service, a WAL does not mean an unclean stop',
  );
  release();
});

t.test('a large WAL of a service is a problem only while much of it is not copied', async (t) => {
  const there = await withProject(t);
  const database = openForWriting(there.dbPath, realEffects);
  t.teardown(() => database.close());
  t.teardown(lockForServing(there.dbPath, process.pid, realEffects));
  database.pragma('wal_autocheckpoint = 0');
  database.exec(`CREATE TABLE filler AS SELECT zeroblob(${WAL_LARGE_BYTES}) AS bytes`);
  t.match(findingOf(await reportOf(t, there, 1), 'wal'), {
    level: 'problem',
    message: /^the WAL has [\d.]+ MB, of which [\d.]+ MB are not copied into the file$/,
    advice: /^a program that reads for long/,
  });
  database.pragma('wal_checkpoint(PASSIVE)');
  t.match(findingOf(await reportOf(t, there, 0), 'wal'), {
    level: 'note',
    message: /^the WAL has [\d.]+ MB: a write makes it short again/,
  });
});

t.test('a process that keeps a write transaction is named, and one that commits is none', async (t) => {
  const there = await withProject(t);
  const writer = await busyWriter(t, there.dbPath);
  const writes = async (exitCode: number) => findingOf(await reportOf(t, there, exitCode), 'writes');
  t.match(await writes(0), { level: 'ok', message: 'no process keeps a write transaction' });
  await writer.stop();

  const script = `
    const database = new (require('better-sqlite3'))(process.argv[1]);
    database.exec('BEGIN IMMEDIATE');
    console.log('begun');
    process.stdin.resume();`;
  const other = spawn(process.execPath, ['-e', script, there.dbPath], { stdio: ['pipe', 'pipe', 'inherit'] });
  t.teardown(() => other.kill('SIGKILL'));
  await once(other.stdout, 'data');
  const before = there.dump();
  t.match(await writes(1), {
    level: 'problem',
    message: new RegExp(
      `^process ${other.pid} \\(\\S+\\) keeps a write transaction: until it ends, davit answers 503 and starts nothing$`,
    ),
    advice: 'end its transaction, or the process',
  });
  t.strictSame(there.dump(), before);
  other.stdin.end();
  await once(other, 'close');
  t.match(await writes(0), { level: 'ok' });
});

t.test('a service that does not come to the end of a commit is told from another process', async (t) => {
  const there = await withProject(t);
  const release = lockForServing(there.dbPath, process.pid, realEffects);
  const writer = new Sqlite(there.dbPath);
  writer.exec('BEGIN IMMEDIATE');
  t.match(findingOf(await reportOf(t, there, 1), 'writes'), {
    level: 'problem',
    message: `the service, process ${process.pid}, does not come to the end of a commit: its disk hardly answers, or not at all`,
    advice: /dmesg/,
  });
  writer.close();
  release();
});

/** Holds the file as a service does that has run since then; the returned function lets it go. */
function servedSince(dbPath: string, sinceMs: number, processId = process.pid): () => void {
  return lockForServing(dbPath, processId, { ...realEffects, now: () => sinceMs });
}
