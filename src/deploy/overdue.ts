import type { Effects } from '../effects.ts';
import type { Store } from '../store/store.ts';

/**
 * Ends the deployments whose report did not come in time. Resolves to the moment when the next one will be due,
 * milliseconds since 1970; null when none is waited for.
 */
export async function endOverdueReports({ reads, writer }: Store, effects: Effects): Promise<number | null> {
  for (;;) {
    const dueAtMs = reads.deployments.nextReportDueAt();
    if (dueAtMs === null || dueAtMs > effects.now()) return dueAtMs;
    await writer.write('deployments.endOverdue', undefined);
  }
}
