import type { DeliveryCounts } from './check-webhooks.ts';
import type { Violation } from './ledger.ts';
import type { FaultKind } from './plan.ts';
import type { Incarnation } from './service.ts';

/** The figures of a run. */
export interface Figures {
  seed: number;
  plan: string;
  seconds: number;
  faults: Partial<Record<FaultKind, number>>;
  /** Kinds that could not be inflicted on this machine, and why. */
  skipped: Partial<Record<FaultKind, string>>;
  kills: number;
  restarts: { count: number; median_ms: number; max_ms: number };
  requests: { sent: number; unanswered: number; by_status: Record<string, number> };
  writes: { acknowledged: number; checked: number; repeated: number; refused: number; doubtful: number };
  deployments: { acknowledged: number; commands_run: number; interrupted: number };
  deliveries: DeliveryCounts & { requests: number; signatures_verified: number };
  backups: { verified: number; refused: number };
  admin_commands: number;
  memory: MemoryFigures[];
  losses: number;
  violations: Violation[];
}

/** Medians of the first and the last third of an incarnation's samples. */
interface MemoryFigures {
  seconds: number;
  resident_mb: [first: number, last: number];
  descriptors: [first: number, last: number];
  /** The most in the first third, and the fewest in the last, as bursts of load only add to both. */
  connections: [most: number, fewest: number];
}

/** A shorter life tells nothing: 120 samples are a minute. */
const SAMPLES_MIN = 120;
/** How much more the last third may hold than the first, which is still warming up. */
const RESIDENT_GROWTH_MAX = { factor: 1.4, megabytes: 40 };
const DESCRIPTORS_GROWTH_MAX = 40;

/** Whether memory and descriptors stayed flat in every life that was long enough to tell. */
export function judgeMemory(incarnations: readonly Pick<Incarnation, 'samples'>[]): {
  memory: MemoryFigures[];
  violations: Violation[];
} {
  const memory = incarnations
    .filter(({ samples }) => samples.length >= SAMPLES_MIN)
    .map(({ samples }) => {
      const third = Math.floor(samples.length / 3);
      const medians = (values: number[]): [number, number] => [
        median(values.slice(0, third)),
        median(values.slice(-third)),
      ];
      const [first, last] = medians(samples.map(({ residentBytes }) => residentBytes / 1_000_000));
      return {
        seconds: samples.length / 2,
        resident_mb: [Math.round(first), Math.round(last)] as [number, number],
        descriptors: medians(samples.map(({ descriptors }) => descriptors)),
        connections: [
          Math.max(...samples.slice(0, third).map(({ connections }) => connections)),
          Math.min(...samples.slice(-third).map(({ connections }) => connections)),
        ] as [number, number],
      };
    });
  const violations = memory
    .filter(({ resident_mb: [first, last], descriptors: [few, many], connections: [most, fewest] }) => {
      const residentMax = first * RESIDENT_GROWTH_MAX.factor + RESIDENT_GROWTH_MAX.megabytes;
      return (
        last > residentMax || many > few + DESCRIPTORS_GROWTH_MAX || fewest > most + DESCRIPTORS_GROWTH_MAX
      );
    })
    .map((figures) => ({ rule: 'memory and descriptors are flat', detail: JSON.stringify(figures) }));
  return { memory, violations };
}

/** The middle value; 0 if there is none. */
export function median(values: readonly number[]): number {
  return values.toSorted((one, other) => one - other)[Math.floor(values.length / 2)] ?? 0;
}

const VIOLATIONS_SHOWN = 10;

/** The figures as text for people. */
export function reportText(figures: Figures): string {
  const { restarts, writes, deployments, deliveries, backups, requests } = figures;
  const faults = Object.entries(figures.faults).map(([kind, count]) => `${kind} ${count}`);
  const answers = Object.entries(requests.by_status).map(([status, count]) => `${count} × ${status}`);
  const lines = [
    `faults              ${faults.join(', ') || 'none'}`,
    ...Object.entries(figures.skipped).map(([kind, reason]) => `skipped             ${kind}: ${reason}`),
    `kills survived      ${figures.kills}`,
    `restarts            ${restarts.count}, ready in ${restarts.median_ms} ms (median), ${restarts.max_ms} ms (max)`,
    `requests            ${requests.sent} (${answers.join(', ')}), ${requests.unanswered} without an answer`,
    `writes              ${writes.acknowledged} acknowledged, ${writes.checked} checked, ${writes.repeated} repeats compared, ${writes.refused} refused, ${writes.doubtful} doubtful`,
    `deployments         ${deployments.acknowledged} acknowledged, ${deployments.commands_run} commands run, ${deployments.interrupted} interrupted`,
    `events              ${deliveries.events} checked`,
    `deliveries          ${deliveries.deliveries} checked: ${deliveries.delivered} delivered, ${deliveries.held} held, ${deliveries.exhausted} exhausted, ${deliveries.pending} pending`,
    `receivers           ${deliveries.requests} requests, ${deliveries.signatures_verified} signatures verified`,
    `backups             ${backups.verified} verified, ${backups.refused} refused`,
    `admin commands      ${figures.admin_commands}`,
    ...figures.memory.map(
      ({ seconds, resident_mb: [first, last], descriptors: [few, many], connections: [most, fewest] }) =>
        `memory              in ${seconds} s from ${first} to ${last} MB, descriptors from ${few} to ${many}, ` +
        `connections from at most ${most} to at least ${fewest}`,
    ),
    `losses              ${figures.losses}`,
    ...figures.violations
      .slice(0, VIOLATIONS_SHOWN)
      .map(({ rule, detail }) => `\n  ${rule}\n    ${detail.slice(0, 1_500)}`),
  ];
  const more = figures.violations.length - VIOLATIONS_SHOWN;
  return [...lines, ...(more > 0 ? [`\n  and ${more} more`] : [])].join('\n');
}
