import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { statfsSync } from 'node:fs';
import { connect, type Socket } from 'node:net';
import { text } from 'node:stream/consumers';
import { setTimeout as delay } from 'node:timers/promises';
import type { Client } from './client.ts';
import type { Ledger } from './ledger.ts';
import type { Fault, FaultKind } from './plan.ts';
import type { Receivers } from './receivers.ts';
import { type Preload, type Service, whyNoFaketime, whyNoFiu } from './service.ts';

export interface Faults {
  /** Inflicts a fault; davit runs again when it resolves. */
  inflict(fault: Fault): Promise<void>;
  /** Sends SIGTERM; resolves when davit has ended, and notes a violation if it did not end cleanly. */
  terminate(): Promise<void>;
  /** How often each kind was inflicted, and why the skipped ones were not. */
  done: Partial<Record<FaultKind, number>>;
  skipped: Partial<Record<FaultKind, string>>;
  /** How often the service was killed, in whatever way. */
  kills(): number;
  restartsMs: readonly number[];
}

interface FaultsOptions {
  executable: string;
  databasePath: string;
  service: Service;
  receivers: Receivers;
  ledger: Ledger;
  client: Client;
  /** Where davit's own disk is mounted; null: it has none. */
  disk: string | null;
  /** Called after each start, before anything else is done. */
  onStarted(): Promise<void>;
}

/** A clean stop is promised within this time. */
const STOP_MAX_MS = 30_000;
/** A second serve must refuse within this time; on a busy machine that may take a while. */
const SECOND_SERVE_MAX_MS = 20_000;
const RESIZE_TRIES_MAX = 100;
/** While connections flood in, another client must be answered within this time. */
const PROBE_MAX_MS = 10_000;

/** Why this kind of fault cannot be inflicted on this machine; undefined: it can. */
function whyNot(kind: FaultKind, disk: string | null): string | undefined {
  switch (kind) {
    case 'full-disk':
      return disk === null ? 'mounting a small disk is not allowed here' : undefined;
    case 'failing-fsync':
      return whyNoFiu();
    case 'clock-jumps':
      return whyNoFaketime();
    default:
      return undefined;
  }
}

/** Inflicts faults on davit, one at a time. */
export function createFaults(options: FaultsOptions): Faults {
  const { executable, databasePath, service, receivers, ledger, client, disk, onStarted } = options;
  const done: Faults['done'] = {};
  const skipped: Faults['skipped'] = {};
  const restartsMs: number[] = [];
  let kills = 0;

  return { inflict, terminate, done, skipped, kills: () => kills, restartsMs };

  async function inflict(fault: Fault): Promise<void> {
    const reason = whyNot(fault.kind, disk);
    if (reason !== undefined) {
      skipped[fault.kind] = reason;
      return;
    }
    ledger.note({ fault });
    // davit may have ended by itself, which is a violation already. For `vanish` it need not run.
    if (fault.kind !== 'vanish' && service.current() === null) await start();
    await carryOut(fault);
    done[fault.kind] = (done[fault.kind] ?? 0) + 1;
    ledger.note({ over: fault.kind });
  }

  async function carryOut(fault: Fault): Promise<void> {
    switch (fault.kind) {
      case 'kill':
        await kill();
        await delay(fault.downMs);
        return await start();
      case 'kill-starting':
        return await killStarting(fault.afterMs);
      case 'kill-stopping':
        return await killStopping(fault.afterMs);
      case 'terminate':
        await terminate();
        await delay(fault.downMs);
        return await start();
      case 'freeze':
        return await freeze(fault.forMs);
      case 'second-serve':
        return await serveSecond();
      case 'vanish':
        return await receivers.vanish(fault.receiver, fault.forMs);
      case 'slow-clients':
      case 'flood':
        return await crowd(fault);
      case 'full-disk':
        return await fillDisk(fault);
      case 'failing-fsync':
        return await failFsync(fault);
      case 'clock-jumps':
        return await moveClock(fault);
      default:
        fault satisfies never;
    }
  }

  async function start(preload: Preload = 'nothing'): Promise<void> {
    const { readyMs } = await service.start(preload);
    restartsMs.push(readyMs);
    await onStarted();
  }

  async function kill(): Promise<void> {
    kills += 1;
    await service.end('SIGKILL');
  }

  async function terminate(): Promise<void> {
    const sentAtMs = performance.now();
    const end = await service.end('SIGTERM');
    const tookMs = performance.now() - sentAtMs;
    if (end !== undefined && (end.exitCode !== 0 || tookMs > STOP_MAX_MS)) {
      const how = `${end.signal ?? end.exitCode} after ${Math.round(tookMs)} ms`;
      ledger.violation('SIGTERM stops it cleanly', how);
    }
  }

  async function killStarting(afterMs: number): Promise<void> {
    await kill();
    const child = service.launch();
    child.stdout?.resume();
    await delay(afterMs);
    kills += 1;
    child.kill('SIGKILL');
    await once(child, 'exit');
    await start();
  }

  async function killStopping(afterMs: number): Promise<void> {
    const ending = service.end('SIGTERM');
    const stillRuns = await Promise.race([ending.then(() => false), delay(afterMs, true)]);
    if (stillRuns) await kill();
    await ending;
    await start();
  }

  async function freeze(forMs: number): Promise<void> {
    const { process: child } = current();
    child.kill('SIGSTOP');
    await delay(forMs);
    child.kill('SIGCONT');
  }

  async function serveSecond(): Promise<void> {
    const words = ['serve', '--db', databasePath, '--listen', '127.0.0.1:0'];
    const second = spawn(executable, words, {
      stdio: ['ignore', 'pipe', 'pipe'],
      env: { PATH: '/usr/bin:/bin' },
    });
    const timer = setTimeout(() => second.kill('SIGKILL'), SECOND_SERVE_MAX_MS);
    const [stdout, stderr] = await Promise.all([text(second.stdout), text(second.stderr)]);
    if (second.exitCode === null && second.signalCode === null) await once(second, 'exit');
    clearTimeout(timer);
    if (second.exitCode !== 1 || stdout !== '' || !/is served already by process \d+/.test(stderr)) {
      const how = `${second.signalCode ?? second.exitCode}, stdout ${stdout}, stderr ${stderr}`;
      ledger.violation('a second serve refuses and says who serves', how);
    }
  }

  /** Opens connections that send nothing, or half a request; other clients must still be answered. */
  async function crowd({ kind, count, forMs }: Fault & { kind: 'slow-clients' | 'flood' }): Promise<void> {
    const url = new URL(current().url);
    const sockets = Array.from({ length: count }, (_, index) => {
      const socket = connect(Number(url.port), url.hostname);
      socket.on('error', () => undefined).on('data', (bytes) => judgeCrowd(bytes));
      if (kind === 'slow-clients') socket.write(HALF_REQUESTS[index % HALF_REQUESTS.length] ?? '');
      return socket;
    });
    const leaving = delay(forMs);
    await delay(50);
    const outcome = await client.call({ method: 'GET', path: '/healthz', timeoutMs: PROBE_MAX_MS });
    if (outcome.kind === 'unanswered') {
      ledger.violation('a crowd holds nobody up', `${kind} of ${count}: no answer within ${PROBE_MAX_MS} ms`);
    }
    await leaving;
    for (const socket of sockets) leave(socket);
  }

  function judgeCrowd(bytes: Buffer): void {
    const answer = bytes.toString('latin1');
    if (!/^HTTP\/1\.1 4\d\d /.test(answer)) ledger.violation('half a request is answered with 4xx', answer);
  }

  /** Shrinks the disk to what is on it and `spareBytes`, and enlarges it again. */
  async function fillDisk({ spareBytes, forMs }: Fault & { kind: 'full-disk' }): Promise<void> {
    const { bsize, blocks } = statfsSync(must(disk));
    for (let tries = 1; ; tries += 1) {
      const { bfree } = statfsSync(must(disk));
      if (resizeDisk((blocks - bfree) * bsize + spareBytes)) break;
      // More than `spareBytes` has been written meanwhile.
      if (tries === RESIZE_TRIES_MAX) throw new Error('the disk could not be made small');
    }
    await delay(forMs);
    resizeDisk(blocks * bsize);
  }

  function resizeDisk(bytes: number): boolean {
    // With a source: without one, mount would add the options of the existing mount, which only root may set.
    const words = ['-t', 'tmpfs', '-o', `remount,size=${bytes}`, 'none', must(disk)];
    return spawnSync('mount', words).status === 0;
  }

  async function failFsync({ share, forMs, thenKill }: Fault & { kind: 'failing-fsync' }): Promise<void> {
    await kill();
    await start('fiu');
    service.failFsync(share);
    await delay(forMs);
    if (service.current() === null) return await start();
    if (thenKill) {
      await kill();
    } else {
      service.failFsync(0);
      await delay(500);
      await terminate();
    }
    await start();
  }

  async function moveClock({ jumps }: Fault & { kind: 'clock-jumps' }): Promise<void> {
    await terminate();
    await start('faketime');
    for (const { offsetMs, forMs } of jumps) {
      service.setClock(offsetMs);
      await delay(forMs);
    }
    await kill();
    await start();
  }

  function current() {
    return must(service.current());
  }
}

const HALF_REQUESTS = [
  'GET /v2/proj',
  'GET /v2/projects HTTP/1.1\r\nHost: davit\r\nAuthorization: Bea',
  'POST /v2/webhooks HTTP/1.1\r\nHost: davit\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"url":',
  'POST /v2/webhooks HTTP/1.1\r\nHost: davit\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"u',
];

function leave(socket: Socket): void {
  socket.removeAllListeners('data');
  socket.destroy();
}

function must<Value>(value: Value | null): Value {
  if (value === null) throw new Error('davit does not run');
  return value;
}

/**
 * The words to run a program with so that it may mount a disk that no other process sees; undefined: that is not
 * allowed.
 */
export function mountingPrefix(): string[] | undefined {
  return [
    ['unshare', '--mount'],
    ['unshare', '--mount', '--user', '--map-root-user'],
  ].find(
    ([file = '', ...words]) =>
      spawnSync(file, [...words, 'mount', '-t', 'tmpfs', 'none', '/mnt']).status === 0,
  );
}
