import { execFileSync } from 'node:child_process';
import { cpSync, existsSync, readFileSync, rmSync } from 'node:fs';
import { basename, join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import Sqlite from 'better-sqlite3';
import { createAdministration } from './administration.ts';
import { checkAcknowledged, checkFile, checkIdle } from './check.ts';
import { checkThroughApi } from './check-api.ts';
import { createClient } from './client.ts';
import { createFaults } from './faults.ts';
import { createLedger, type Ledger } from './ledger.ts';
import { createLoader } from './load.ts';
import { makePlace, makeProjectsAndKeys } from './place.ts';
import { COMMAND_PROJECTS, type Fault, type Plan } from './plan.ts';
import { signatureProblem, startReceivers, type Unverified } from './receivers.ts';
import { type Figures, judgeMemory, median } from './report.ts';
import { createService, markedProcesses } from './service.ts';
import { judgeFile } from './verdict.ts';

interface RunOptions {
  plan: Plan;
  executable: string;
  /** Created for the run, and removed after a run without losses. */
  directory: string;
  /** Whether a disk may be mounted for davit's data. */
  mayMount: boolean;
  onProgress(line: string): void;
}

const SAMPLE_EVERY_MS = 500;
/** How many steps of load may be under way at a time. */
const UNDER_WAY_MAX = 150;
/** How long davit may take to become idle once the load has ended: its retries end after 40 s. */
const SETTLE_MAX_MS = 180_000;
const ANSWERED_WITHIN_MS = 60_000;
/** A larger file is read as a whole only at the end. */
const READ_WHOLE_MAX_BYTES = 60_000_000;
/** How large the file may become, per minute of the run; on a tmpfs, unused space costs nothing. */
const DISK_BYTES_PER_MINUTE = 120_000_000;

/** Carries a plan out, and resolves to its figures. */
export async function run(options: RunOptions): Promise<{ figures: Figures; keptIn: string | null }> {
  const { plan, executable, directory, mayMount, onProgress } = options;
  const startedAtMs = performance.now();
  const diskBytes = DISK_BYTES_PER_MINUTE * (1 + Math.ceil(plan.durationMs / 60_000));
  const place = makePlace(directory, basename(directory), mayMount ? diskBytes : null);
  const ledger = createLedger(place.ledgerFile);
  ledger.note({ seed: plan.seed, plan: plan.hash });
  const service = createService({
    executable,
    directory,
    databasePath: place.databasePath,
    onUnexpectedEnd: (detail) => ledger.violation('it ends only when it is told to', detail),
  });
  const client = createClient(service.url, (problem) =>
    ledger.violation('answers keep the contract', problem),
  );
  const receivers = await startReceivers(plan.seed);
  const { projectIds, keys } = await makeProjectsAndKeys(executable, place);
  const administration = createAdministration({
    executable,
    databasePath: place.databasePath,
    backupDirectory: place.backupDirectory,
    ledger,
    projectIds: projectIds.slice(0, COMMAND_PROJECTS),
    async isLetIn(keySecret) {
      const outcome = await client.call({ method: 'GET', path: '/v2/projects', keySecret });
      return outcome.kind === 'unanswered' || outcome.status >= 500 ? undefined : outcome.status !== 401;
    },
  });
  const loader = createLoader({ client, ledger, receivers, administration, projectIds, keys });
  let checkedAtRestarts = 0;
  const faults = createFaults({
    ...{ executable, databasePath: place.databasePath, service, receivers, ledger, client },
    disk: place.disk,
    onStarted: checkAfterStart,
  });
  const waitingForSecret: Unverified[] = [];
  let signaturesVerified = 0;

  // However this process ends, davit and its commands end with it.
  const exit = () => process.exit(1);
  process.once('exit', endAll).once('SIGINT', exit).once('SIGTERM', exit);
  await service.start();
  const sampling = setInterval(sample, SAMPLE_EVERY_MS);
  try {
    await carryOut();
    await settle();
    await checkThroughApi(client, ledger, keys);
    await faults.terminate();
    if (existsSync(`${place.databasePath}-wal`))
      ledger.violation('a clean stop leaves no WAL', 'there is one');
  } catch (error) {
    ledger.violation('the run comes to its end', textOf(error));
    await service.end('SIGKILL');
  } finally {
    clearInterval(sampling);
    endAll();
    process.off('exit', endAll).off('SIGINT', exit).off('SIGTERM', exit);
  }
  const figures = judge();
  await receivers.close();
  client.close();
  return { figures, keptIn: clearAway(figures) };

  async function carryOut(): Promise<void> {
    let beganAtMs = performance.now();
    const underWay = new Set<Promise<void>>();
    const aside: Promise<void>[] = [];
    let inflicting = Promise.resolve();
    for (const step of plan.steps) {
      const waitMs = beganAtMs + step.atMs - performance.now();
      if (waitMs > 0) await delay(waitMs);
      if ('fault' in step) {
        // A receiver that vanishes affects no other fault; all others are inflicted one at a time.
        if (step.fault.kind === 'vanish') {
          aside.push(inflict(step.fault));
          continue;
        }
        // If a fault takes longer than planned, all later steps are delayed.
        const dueAtMs = performance.now();
        await inflicting;
        beganAtMs += performance.now() - dueAtMs;
        inflicting = inflict(step.fault);
        continue;
      }
      while (underWay.size >= UNDER_WAY_MAX) await Promise.race(underWay);
      const doing = loader.perform(step.load).finally(() => underWay.delete(doing));
      underWay.add(doing);
    }
    await Promise.all([inflicting, ...aside]);
    await receivers.heal();
    await Promise.race([Promise.all(underWay), delay(ANSWERED_WITHIN_MS, undefined, { ref: false })]);
    if (underWay.size > 0) {
      const open = ledger.writes
        .filter(({ fate }) => fate === 'open')
        .map(({ number, path }) => `${number} ${path}`);
      ledger.violation(
        'every request is answered in the end',
        `${underWay.size} are not: ${open.join(', ')}`,
      );
    }
    loader.giveUp();
    await Promise.all(underWay);
  }

  /** If a fault fails, or davit does not start after it, the run goes on: the other faults tell more. */
  function inflict(fault: Fault): Promise<void> {
    return faults.inflict(fault).catch((error: unknown) => {
      ledger.violation('every fault can be done and survived', `${JSON.stringify(fault)}: ${textOf(error)}`);
    });
  }

  /** With no more load, and all receivers well, davit must become idle. */
  async function settle(): Promise<void> {
    await administration.resumeAll();
    const untilMs = performance.now() + SETTLE_MAX_MS;
    for (;;) {
      const waiting = withFile(checkIdle);
      const left = markedProcesses(place.runName);
      onProgress(`settling: ${waiting.length} wait, ${left.length} processes`);
      if (waiting.length === 0 && left.length === 0) return;
      if (performance.now() > untilMs) {
        for (const process of left) ledger.violation('no process is left', JSON.stringify(process));
        return;
      }
      await delay(250);
    }
  }

  /** Checks at once that the latest acknowledged writes are there, and that no process of an interrupted command is. */
  async function checkAfterStart(): Promise<void> {
    const left = markedProcesses(place.runName);
    const deployments = [...ledger.deployments.values()].slice(-300);
    const writes = ledger.writes.slice(checkedAtRestarts);
    checkedAtRestarts = Math.max(0, ledger.writes.length - UNDER_WAY_MAX);
    const violations = withFile((file) => {
      const status = file.prepare<[string], { status: string; reason: string | null }>(
        'SELECT status, reason FROM deployments WHERE id = ?',
      );
      const [pages, pageBytes] = ['page_count', 'page_size'].map((name) =>
        file.pragma(name, { simple: true }),
      );
      const bytes = Number(pages) * Number(pageBytes);
      return [
        ...left
          .filter(({ deploymentId }) => status.get(deploymentId)?.reason === 'interrupted')
          .map((process) => ({ rule: 'an interrupted command is gone', detail: JSON.stringify(process) })),
        ...checkAcknowledged(file, deployments, writes),
        ...(bytes < READ_WHOLE_MAX_BYTES ? checkFile(file) : []),
      ];
    });
    for (const { rule, detail } of violations) ledger.violation(`after a start: ${rule}`, detail);
  }

  function judge(): Figures {
    verifySignatures(true);
    const runs = readFileSync(place.runsFile, 'utf8').split('\n').filter(Boolean);
    const file = new Sqlite(place.databasePath, { readonly: true });
    const { violations: found, counts: deliveries } = judgeFile(file, {
      ledger,
      runs,
      inboxes: receivers.inboxes,
      sees: (keyId, projectId) =>
        keys.some(({ id, projectIds: seen }) => id === keyId && (seen === null || seen.has(projectId))),
    });
    const memory = judgeMemory(service.incarnations);
    const violations = [...ledger.violations, ...found, ...memory.violations];
    const interrupted = file
      .prepare<[], number>("SELECT count(*) FROM deployments WHERE reason = 'interrupted'")
      .pluck()
      .get();
    file.close();
    const { counts } = ledger;
    return {
      seed: plan.seed,
      plan: plan.hash,
      seconds: Math.round((performance.now() - startedAtMs) / 1000),
      faults: faults.done,
      skipped: faults.skipped,
      kills: faults.kills(),
      restarts: {
        count: faults.restartsMs.length,
        median_ms: Math.round(median(faults.restartsMs)),
        max_ms: Math.round(Math.max(0, ...faults.restartsMs)),
      },
      requests: {
        sent: client.figures.requests,
        unanswered: client.figures.unanswered,
        by_status: client.figures.answers,
      },
      writes: {
        acknowledged: counts.acknowledged,
        checked: checkedWrites(ledger),
        repeated: counts.repeats,
        refused: counts.refused,
        doubtful: counts.doubtful,
      },
      deployments: {
        acknowledged: ledger.deployments.size,
        commands_run: runs.length,
        interrupted: interrupted ?? 0,
      },
      deliveries: {
        ...deliveries,
        requests: receivers.requests(),
        signatures_verified: signaturesVerified,
      },
      backups: {
        verified: administration.figures.backups,
        refused: administration.figures.backupsRefused,
      },
      admin_commands: administration.figures.commands,
      memory: memory.memory,
      losses: violations.length,
      violations,
    };
  }

  function sample(): void {
    service.sample();
    verifySignatures(false);
    const { counts } = ledger;
    const seconds = Math.round((performance.now() - startedAtMs) / 1000);
    onProgress(
      `${seconds} s: ${counts.acknowledged} writes acknowledged, ${receivers.requests()} deliveries received, ` +
        `${faults.kills()} kills, ${ledger.violations.length} violations`,
    );
  }

  /** A delivery may arrive before the answer with its secret: it is tried again each time, until the last. */
  function verifySignatures(isLast: boolean): void {
    const secretsOf = new Map([...ledger.webhooks.values()].map(({ path, secrets }) => [path, secrets]));
    for (const delivery of [...waitingForSecret.splice(0), ...receivers.takeUnverified()]) {
      const secrets = secretsOf.get(delivery.path) ?? [];
      const problem = signatureProblem(delivery, secrets);
      if (problem === undefined) signaturesVerified += 1;
      else if (!isLast) waitingForSecret.push(delivery);
      // The secret of a webhook whose registration was never acknowledged is not known.
      else if (secrets.length > 0) ledger.violation('signatures verify', `${delivery.path}: ${problem}`);
    }
  }

  function withFile<Result>(read: (file: Sqlite.Database) => Result): Result {
    const file = new Sqlite(place.databasePath, { readonly: true, timeout: 10_000 });
    try {
      return read(file);
    } finally {
      file.close();
    }
  }

  function endAll(): void {
    service.killAll();
    for (const { processId } of markedProcesses(place.runName)) {
      try {
        process.kill(processId, 'SIGKILL');
      } catch {
        // it is gone
      }
    }
  }

  function clearAway({ losses }: Figures): string | null {
    if (losses > 0) {
      // davit's disk vanishes with this process.
      if (place.disk !== null) cpSync(place.disk, join(directory, 'kept'), { recursive: true });
      return directory;
    }
    if (place.disk !== null) execFileSync('umount', ['--lazy', place.disk]);
    rmSync(directory, { recursive: true });
    return null;
  }
}

/** How many of the acknowledged writes could be checked, by their stored answer, by a row, or by both. */
function checkedWrites({ writes, deployments, made }: Ledger): number {
  const answered = writes.filter(({ answer }) => answer !== null);
  const byAdmin = [...deployments.values()].filter(({ trigger }) => trigger === 'admin');
  const visible = answered.filter(
    ({ name, idempotencyKey }) =>
      idempotencyKey !== null || ['deploy', 'redeploy', 'cancel', 'report'].includes(name),
  );
  return visible.length + byAdmin.length + made.length;
}

function textOf(error: unknown): string {
  return error instanceof Error ? String(error.stack) : String(error);
}
