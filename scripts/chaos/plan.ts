import { createHash } from 'node:crypto';
import { EVENT_TYPES, type EventType } from '../../src/domain.ts';
import type { CommandKind } from './commands.ts';
import { createRandom, type Random } from './random.ts';
import { RECEIVER_KINDS, VANISHING } from './receivers.ts';

/*
 * What is done when: a pure function of seed, duration and the kinds of faults. What a step applies to, such as the
 * deployment that it cancels, depends on what davit has done until then; the plan only has a fraction, `pick`, of what
 * there is.
 */

/** Faults that need nothing but the right to send signals; SPECIAL_FAULTS need more. */
export const COMMON_FAULTS = [
  'kill',
  'kill-starting',
  'kill-stopping',
  'terminate',
  'freeze',
  'second-serve',
  'vanish',
  'slow-clients',
  'flood',
] as const;
const SPECIAL_FAULTS = ['full-disk', 'failing-fsync', 'clock-jumps'] as const;
export const FAULT_KINDS = [...COMMON_FAULTS, ...SPECIAL_FAULTS] as const;
export type FaultKind = (typeof FAULT_KINDS)[number];

export type Fault =
  /** SIGKILL, and a start after `downMs`. */
  | { kind: 'kill'; downMs: number }
  /** SIGKILL, and again `afterMs` after the next start, possibly during recovery. */
  | { kind: 'kill-starting'; afterMs: number }
  /** SIGTERM, and SIGKILL `afterMs` later. */
  | { kind: 'kill-stopping'; afterMs: number }
  | { kind: 'terminate'; downMs: number }
  /** SIGSTOP, and SIGCONT `forMs` later. */
  | { kind: 'freeze'; forMs: number }
  | { kind: 'second-serve' }
  /** A receiver closes its port and every connection, and is back after `forMs`. */
  | { kind: 'vanish'; receiver: number; forMs: number }
  /** Connections with half a request line, half of the headers, half a body. */
  | { kind: 'slow-clients'; count: number; forMs: number }
  | { kind: 'flood'; count: number; forMs: number }
  /** Leaves `spareBytes` of the disk. */
  | { kind: 'full-disk'; spareBytes: number; forMs: number }
  /** Makes this share of all fsyncs fail; with `thenKill`, SIGKILL follows while they do. */
  | { kind: 'failing-fsync'; share: number; forMs: number; thenKill: boolean }
  /** Sets the clock off by each of these in turn. */
  | { kind: 'clock-jumps'; jumps: { offsetMs: number; forMs: number }[] };

/**
 * What becomes of a request: its answer is waited for, or the client breaks the connection before or when it arrives.
 */
export type Fate = 'waits' | 'breaks-off' | 'loses-answer';

/** How a client sends a write: with or without an Idempotency-Key, and how many copies at the same time. */
export interface Sending {
  fate: Fate;
  idempotent: boolean;
  copies: number;
}

export type Load =
  | { kind: 'deploy'; project: number; command: CommandKind; sending: Sending }
  | { kind: 'cancel' | 'redeploy'; pick: number; sending: Sending }
  | { kind: 'report'; pick: number; status: 'running' | 'succeeded' | 'failed'; sending: Sending }
  | { kind: 'register'; receiver: number; events: EventType[]; sending: Sending }
  | { kind: 'describe' | 'disable' | 'enable' | 'remove' | 'ping' | 'replay'; pick: number; sending: Sending }
  | { kind: 'subscribe'; pick: number; events: EventType[]; sending: Sending }
  | { kind: 'rotate'; pick: number; overlapSeconds: number; sending: Sending }
  | { kind: 'redeliver'; pick: number; deliveryPick: number; sending: Sending }
  /** Repeats an earlier write byte for byte. */
  | { kind: 'repeat'; pick: number }
  | { kind: 'read'; what: 'deployment' | 'wait' | 'list' | 'log' | 'webhook' | 'deliveries'; pick: number }
  | { kind: 'administer'; what: AdminWork; pick: number }
  | { kind: 'backup' };

export type AdminWork = 'deploy' | 'cancel' | 'pause' | 'throwaway-key' | 'queue' | 'doctor' | 'project';

export type Step = { atMs: number } & ({ load: Load } | { fault: Fault });

export interface Plan {
  seed: number;
  durationMs: number;
  steps: Step[];
  /** A hash of the other fields. */
  hash: string;
}

/** Projects with a command, and projects without one, whose deployments are reported. */
export const COMMAND_PROJECTS = 10;
export const REPORTED_PROJECTS = 2;

/** Runs of this length or more have a period in which davit keeps running, as memory leaks show only over time. */
const CALM_NEEDS_MS = 4 * 60_000;
const CALM = { from: 0.4, to: 0.65 };
/** A shorter run has its faults closer together. */
const SHORT_MS = 30_000;
const HARMLESS: readonly FaultKind[] = ['vanish', 'slow-clients', 'flood', 'freeze', 'second-serve'];

/** Makes the plan of `durationMs` with these kinds of fault. */
export function makePlan(seed: number, durationMs: number, kinds: readonly FaultKind[]): Plan {
  const steps = [...loadSteps(seed, durationMs), ...faultSteps(seed, durationMs, kinds)];
  steps.sort((one, other) => one.atMs - other.atMs);
  const hash = createHash('sha256').update(JSON.stringify({ seed, durationMs, steps })).digest('hex');
  return { seed, durationMs, steps, hash: hash.slice(0, 16) };
}

function loadSteps(seed: number, durationMs: number): Step[] {
  const random = createRandom(`load ${seed}`);
  const steps: Step[] = [
    ...beginning(random),
    { atMs: Math.round(durationMs / 2), load: { kind: 'backup' } },
  ];
  for (let atMs = 300; atMs < durationMs; atMs += random.between(5, 90)) {
    steps.push({ atMs, load: anyLoad(random) });
  }
  return steps;
}

/** Registers a webhook for all events at every receiver, so that there are deliveries from the beginning. */
function beginning(random: Random): Step[] {
  return RECEIVER_KINDS.map((_, receiver) => ({
    atMs: 0,
    load: { kind: 'register', receiver, events: [...EVENT_TYPES], sending: sending(random) },
  }));
}

const LOAD_WEIGHTS: Record<Load['kind'], number> = {
  deploy: 36,
  cancel: 7,
  redeploy: 3,
  report: 6,
  register: 1.2,
  describe: 2,
  disable: 1,
  enable: 1.5,
  remove: 0.6,
  ping: 1,
  replay: 0.5,
  subscribe: 0.5,
  rotate: 1,
  redeliver: 3,
  repeat: 9,
  read: 22,
  administer: 3,
  backup: 0.6,
};

const COMMAND_WEIGHTS: Record<CommandKind, number> = {
  quick: 56,
  fails: 12,
  slow: 9,
  outputs: 8,
  deaf: 3,
  scatters: 5,
  floods: 1.5,
  dies: 3,
  hangs: 1.5,
};

const FATE_WEIGHTS: Record<Fate, number> = { waits: 84, 'breaks-off': 8, 'loses-answer': 8 };

function sending(random: Random): Sending {
  return {
    fate: random.weighted(FATE_WEIGHTS),
    idempotent: random.chance(0.9),
    copies: random.chance(0.12) ? random.between(2, 5) : 1,
  };
}

function anyLoad(random: Random): Load {
  const kind = random.weighted(LOAD_WEIGHTS);
  const pick = random.fraction();
  switch (kind) {
    case 'deploy': {
      const project = random.between(0, COMMAND_PROJECTS + REPORTED_PROJECTS - 1);
      return { kind, project, command: random.weighted(COMMAND_WEIGHTS), sending: sending(random) };
    }
    case 'report':
      return {
        kind,
        pick,
        status: random.pick(['running', 'succeeded', 'failed']),
        sending: sending(random),
      };
    case 'register': {
      const receiver = random.between(0, RECEIVER_KINDS.length - 1);
      return { kind, receiver, events: someEvents(random), sending: sending(random) };
    }
    case 'subscribe':
      return { kind, pick, events: someEvents(random), sending: sending(random) };
    case 'rotate':
      return { kind, pick, overlapSeconds: random.pick([0, 1, 60]), sending: sending(random) };
    case 'redeliver':
      return { kind, pick, deliveryPick: random.fraction(), sending: sending(random) };
    case 'repeat':
      return { kind, pick };
    case 'read':
      return {
        kind,
        pick,
        what: random.weighted({ deployment: 10, wait: 2, list: 3, log: 4, webhook: 2, deliveries: 2 }),
      };
    case 'administer':
      return {
        kind,
        pick,
        what: random.weighted({
          deploy: 4,
          cancel: 2,
          pause: 2,
          'throwaway-key': 1,
          queue: 1,
          doctor: 0.5,
          project: 0.5,
        }),
      };
    case 'backup':
      return { kind };
    default:
      return { kind, pick, sending: sending(random) };
  }
}

function someEvents(random: Random): EventType[] {
  const events = EVENT_TYPES.filter(() => random.chance(0.6));
  return events.length === 0 ? ['deployment.succeeded'] : events;
}

const FAULT_WEIGHTS: Record<FaultKind, number> = {
  kill: 7,
  'kill-starting': 2,
  'kill-stopping': 1.5,
  terminate: 1.5,
  freeze: 2,
  'second-serve': 1,
  vanish: 4,
  'slow-clients': 1.5,
  flood: 1,
  'full-disk': 1.5,
  'failing-fsync': 1.5,
  'clock-jumps': 1,
};

function faultSteps(seed: number, durationMs: number, kinds: readonly FaultKind[]): Step[] {
  const random = createRandom(`faults ${seed}`);
  const hasCalm = durationMs >= CALM_NEEDS_MS;
  const steps: Step[] = [];
  if (kinds.length === 0) return steps;
  // Each kind once, in random order, before kinds repeat: so a short run has them all, too.
  const unseen = [...kinds];
  const gap = durationMs < SHORT_MS ? { least: 200, most: 1_200 } : { least: 800, most: 4_800 };
  for (let atMs = 600; atMs < durationMs; atMs += random.between(gap.least, gap.most)) {
    const isCalm = hasCalm && atMs > durationMs * CALM.from && atMs < durationMs * CALM.to;
    const possible = isCalm ? kinds.filter((kind) => HARMLESS.includes(kind)) : kinds;
    const first = isCalm ? [] : unseen.filter((kind) => possible.includes(kind));
    const kind = first.length > 0 ? random.pick(first) : weightedOf(random, possible);
    if (kind === undefined) continue;
    if (unseen.includes(kind)) unseen.splice(unseen.indexOf(kind), 1);
    steps.push({ atMs, fault: faultOf(kind, random) });
  }
  return steps;
}

function weightedOf(random: Random, kinds: readonly FaultKind[]): FaultKind | undefined {
  if (kinds.length === 0) return undefined;
  const weights = Object.fromEntries(kinds.map((kind) => [kind, FAULT_WEIGHTS[kind]]));
  return random.weighted(weights as Record<FaultKind, number>);
}

function faultOf(kind: FaultKind, random: Random): Fault {
  switch (kind) {
    case 'kill':
    case 'terminate':
      return { kind, downMs: random.chance(0.7) ? 0 : random.between(100, 1_500) };
    case 'kill-starting':
      return { kind, afterMs: random.between(20, 400) };
    case 'kill-stopping':
      return { kind, afterMs: random.between(0, 800) };
    case 'second-serve':
      return { kind };
    case 'freeze':
      return { kind, forMs: random.between(300, 4_000) };
    case 'vanish':
      return { kind, receiver: random.pick(VANISHING), forMs: random.between(500, 6_000) };
    case 'slow-clients':
      return { kind, count: random.between(20, 100), forMs: random.between(500, 2_500) };
    case 'flood':
      return { kind, count: random.between(100, 500), forMs: random.between(200, 1_500) };
    case 'full-disk':
      return {
        kind,
        spareBytes: random.pick([0, 4_096, 65_536, 400_000]),
        forMs: random.between(500, 4_000),
      };
    case 'failing-fsync':
      return {
        kind,
        share: random.pick([0.05, 0.3, 1]),
        forMs: random.between(500, 3_000),
        thenKill: random.chance(0.5),
      };
    case 'clock-jumps':
      return { kind, jumps: Array.from({ length: random.between(1, 4) }, () => jump(random)) };
    default:
      return kind satisfies never;
  }
}

/** An hour at most, in both directions: with days, memories that last for days would rightly expire. */
function jump(random: Random): { offsetMs: number; forMs: number } {
  return { offsetMs: random.between(-3_600, 3_600) * 1_000, forMs: random.between(500, 2_500) };
}
