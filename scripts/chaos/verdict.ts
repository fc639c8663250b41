import type { Database } from 'better-sqlite3';
import {
  checkAcknowledged,
  checkEnds,
  checkFile,
  checkIdle,
  checkMade,
  checkRedeployments,
  checkRefs,
  checkRuns,
} from './check.ts';
import {
  checkDeliveries,
  checkWebhooks,
  type DeliveryCounts,
  type DeliveryEvidence,
} from './check-webhooks.ts';
import type { Ledger, Violation } from './ledger.ts';

/** All that is known of a run apart from davit's file. */
export interface Evidence extends Omit<DeliveryEvidence, 'webhooks' | 'deployments'> {
  ledger: Pick<Ledger, 'deployments' | 'webhooks' | 'writes' | 'refs' | 'made'>;
  /** Deployments whose commands recorded that they ran, in order. */
  runs: readonly string[];
}

/** Makes all checks of the file, once davit has become idle and was stopped. */
export function judgeFile(
  file: Database,
  evidence: Evidence,
): { violations: Violation[]; counts: DeliveryCounts } {
  const { ledger, runs } = evidence;
  const { deployments, webhooks, writes } = ledger;
  const doubtfulRedeployments = writes.filter(({ name, fate }) => name === 'redeploy' && fate === 'doubtful');
  const deliveries = checkDeliveries(file, { ...evidence, deployments, webhooks }, { settled: true });
  return {
    violations: [
      ...checkFile(file),
      ...checkAcknowledged(file, deployments.values(), writes),
      ...checkMade(file, ledger.made),
      ...checkRefs(file, ledger.refs),
      ...checkRedeployments(file, deployments, doubtfulRedeployments.length),
      ...checkRuns(file, runs, deployments),
      ...checkEnds(file, deployments),
      ...checkIdle(file),
      ...checkWebhooks(file, { ...evidence, webhooks }),
      ...deliveries.violations,
    ],
    counts: deliveries.counts,
  };
}
