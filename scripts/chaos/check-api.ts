import type { Deployment, Page, Webhook } from '../../src/domain.ts';
import type { Client } from './client.ts';
import type { Ledger } from './ledger.ts';
import type { ApiKey } from './load.ts';

/**
 * Walks all pages as a client does: for each key, every acknowledged deployment that it sees, and every webhook of its
 * own that was not deleted, is on exactly one page.
 */
export async function checkThroughApi(
  client: Client,
  ledger: Ledger,
  keys: readonly ApiKey[],
): Promise<void> {
  for (const key of keys) {
    const askedAtMs = performance.now();
    const deployments = await walk<Deployment>(client, ledger, key, '/v2/deployments');
    const visible = [...ledger.deployments.values()].filter(
      ({ projectId }) => key.projectIds === null || key.projectIds.has(projectId),
    );
    compare('deployments', visible, deployments, ledger);
    for (const deployment of deployments) ledger.observe(deployment, askedAtMs);
    const webhooks = await walk<Webhook>(client, ledger, key, '/v2/webhooks');
    const own = [...ledger.webhooks.values()].filter(
      ({ keyId, deleted, busy }) => keyId === key.id && !deleted && !busy,
    );
    compare('webhooks', own, webhooks, ledger);
  }
}

async function walk<Item>(client: Client, ledger: Ledger, key: ApiKey, path: string): Promise<Item[]> {
  const items: Item[] = [];
  for (let cursor: string | null = ''; cursor !== null; ) {
    const query = cursor === '' ? '' : `&cursor=${encodeURIComponent(cursor)}`;
    const outcome = await client.call({
      method: 'GET',
      path: `${path}?limit=200${query}`,
      keySecret: key.secret,
    });
    if (outcome.kind === 'unanswered' || outcome.status !== 200) {
      ledger.violation('lists can be walked', `${path} → ${JSON.stringify(outcome)}`);
      break;
    }
    const page = JSON.parse(outcome.body) as Page<Item>;
    items.push(...page.data);
    cursor = page.next_cursor;
  }
  return items;
}

function compare(
  what: string,
  expected: readonly { id: string }[],
  found: readonly { id: string }[],
  ledger: Ledger,
): void {
  const ids = new Set(found.map(({ id }) => id));
  if (ids.size !== found.length) ledger.violation('a walk sees everything once', `some ${what} came twice`);
  for (const { id } of expected) {
    if (!ids.has(id)) ledger.violation('a walk sees everything once', `${id} is on no page of ${what}`);
  }
}
