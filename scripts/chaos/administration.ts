import { execFile } from 'node:child_process';
import { existsSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import Sqlite from 'better-sqlite3';
import type { Deployment } from '../../src/domain.ts';
import { checkAcknowledged, checkFile } from './check.ts';
import type { Ledger } from './ledger.ts';
import type { AdminWork } from './plan.ts';

const execute = promisify(execFile);

export interface Administration {
  perform(what: AdminWork, pick: number): Promise<void>;
  backup(): Promise<void>;
  /** Resumes all projects that were paused. */
  resumeAll(): Promise<void>;
  figures: { commands: number; backups: number; backupsRefused: number };
}

interface AdministrationOptions {
  executable: string;
  databasePath: string;
  /** Where backups are made, on davit's own disk. */
  backupDirectory: string;
  ledger: Ledger;
  /** Projects whose commands davit runs. */
  projectIds: readonly string[];
  /** Whether a request with this key is authenticated; undefined: davit did not answer. */
  isLetIn(secret: string): Promise<boolean | undefined>;
}

const TIMEOUT_MS = 30_000;

/** Runs the admin commands of an administrator, whether the service runs or not. */
export function createAdministration(options: AdministrationOptions): Administration {
  const { executable, databasePath, backupDirectory, ledger, projectIds, isLetIn } = options;
  const figures = { commands: 0, backups: 0, backupsRefused: 0 };
  const paused = new Set<string>();
  let numbers = 0;

  return { perform, backup, resumeAll, figures };

  /** Runs `davit <words> --json`; resolves to what it printed, if it succeeded. */
  async function davit<Value>(...words: string[]): Promise<{ ok: true; value: Value } | { ok: false }> {
    figures.commands += 1;
    const before = words.includes('--') ? words.indexOf('--') : words.length;
    const all = [...words.slice(0, before), '--json', '--db', databasePath, ...words.slice(before)];
    try {
      const { stdout } = await execute(executable, all, {
        env: { PATH: '/usr/bin:/bin' },
        timeout: TIMEOUT_MS,
        maxBuffer: 64 * 1024 * 1024,
      });
      return { ok: true, value: JSON.parse(stdout) as Value };
    } catch (error) {
      const { code, stderr = '', killed } = error as { code?: number; stderr?: string; killed?: boolean };
      if (killed === true) ledger.violation('admin commands end', `${words.join(' ')} took ${TIMEOUT_MS} ms`);
      // Exit code 1 is a refusal, 2 is a mistake in this script, a signal or a stack trace is a bug of davit's.
      if ((code !== 1 || /^\s+at /m.test(stderr)) && killed !== true) {
        ledger.violation('admin commands say what is wrong', `${words.join(' ')}: exit ${code}: ${stderr}`);
      }
      return { ok: false };
    }
  }

  async function perform(what: AdminWork, pick: number): Promise<void> {
    const projectId = projectIds[Math.floor(pick * projectIds.length)] ?? '';
    numbers += 1;
    switch (what) {
      case 'deploy':
        return await deploy(projectId, `quick/admin-${numbers}`);
      case 'cancel':
        return await cancel(pick);
      case 'pause':
        if (paused.size < 2 && !paused.has(projectId)) paused.add(projectId);
        else return await resumeAll();
        await davit('admin', 'project', 'pause', projectId);
        return;
      case 'throwaway-key':
        return await throwAwayKey(`throwaway-${numbers}`);
      case 'queue':
        await davit('admin', 'queue');
        return;
      case 'doctor':
        await davit('doctor');
        return;
      case 'project': {
        const name = `project-${numbers}`;
        const made = await davit<{ id: string }>(
          'admin',
          'project',
          'create',
          '--name',
          name,
          '--',
          '/bin/true',
        );
        if (made.ok) noteMade('projects', made.value.id, name);
        return;
      }
      default:
        what satisfies never;
    }
  }

  async function deploy(projectId: string, ref: string): Promise<void> {
    const sentAtMs = performance.now();
    ledger.refs.set(ref, 'open');
    const made = await davit<Deployment>(
      'admin',
      'deployment',
      'create',
      projectId,
      ref,
      '--max-queued',
      '40',
    );
    ledger.refs.set(ref, made.ok ? 'acknowledged' : 'doubtful');
    if (!made.ok) return;
    noteAcknowledged('admin deployment create', { answer: made.value });
    ledger.deploymentMade(made.value, sentAtMs);
  }

  async function cancel(pick: number): Promise<void> {
    const unfinished = [...ledger.deployments.values()].filter(({ end }) => end === null).slice(-40);
    const known = unfinished[Math.floor(pick * unfinished.length)];
    if (known === undefined) return;
    known.cancelAsked = true;
    const canceled = await davit<Deployment>('admin', 'deployment', 'cancel', known.id);
    if (!canceled.ok) return;
    noteAcknowledged('admin deployment cancel', { answer: canceled.value });
    ledger.deploymentCanceled(canceled.value);
  }

  /** A key works as soon as it is created, and not once it is revoked. */
  async function throwAwayKey(name: string): Promise<void> {
    const words = ['--all-scopes', '--all-projects'];
    const made = await davit<{ id: string; secret: string }>(
      'admin',
      'key',
      'create',
      '--name',
      name,
      ...words,
    );
    if (!made.ok) return;
    noteMade('keys', made.value.id, name);
    if ((await isLetIn(made.value.secret)) === false) {
      ledger.violation('a key works from its creation on', `${name} was refused`);
    }
    const revoked = await davit('admin', 'key', 'revoke', made.value.id, '--yes');
    if (revoked.ok && (await isLetIn(made.value.secret)) === true) {
      ledger.violation('a revoked key is worth nothing', `${name} was let in`);
    }
  }

  function noteMade(kind: 'projects' | 'keys', id: string, name: string): void {
    noteAcknowledged('admin', { kind, id, name });
    ledger.made.push({ kind, id, name });
  }

  function noteAcknowledged(what: string, detail: Record<string, unknown>): void {
    ledger.counts.acknowledged += 1;
    ledger.note({ acknowledged: what, ...detail });
  }

  async function resumeAll(): Promise<void> {
    for (const projectId of [...paused]) {
      const resumed = await davit('admin', 'project', 'resume', projectId);
      if (resumed.ok) paused.delete(projectId);
    }
  }

  /** A backup has everything that was acknowledged before it was asked for, or it fails and leaves no file. */
  async function backup(): Promise<void> {
    // Copies, as what is acknowledged from now on need not be in the backup.
    const acknowledged = [...ledger.deployments.values()].map((known) => ({ ...known }));
    const writes = ledger.writes.filter(({ fate }) => fate === 'acknowledged');
    numbers += 1;
    const path = join(backupDirectory, `backup-${numbers}.db`);
    const made = await davit('backup', path);
    if (!made.ok) {
      figures.backupsRefused += 1;
      if (existsSync(path)) ledger.violation('a copy that failed is not there', path);
      return;
    }
    const copy = new Sqlite(path, { readonly: true });
    const violations = [...checkFile(copy), ...checkAcknowledged(copy, acknowledged, writes)];
    copy.close();
    for (const { rule, detail } of violations) ledger.violation(`backup: ${rule}`, detail);
    figures.backups += 1;
    for (const suffix of ['', '-wal', '-shm']) rmSync(`${path}${suffix}`, { force: true });
  }
}
