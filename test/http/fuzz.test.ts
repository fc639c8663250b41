import fc from 'fast-check';
import t from 'tap';
import type { Exchange } from '../helpers/contract.ts';
import { createFuzzClient, type FuzzRequest, fuzzRequests, type Pool, remember } from '../helpers/fuzzing.ts';
import { startReceiver } from '../helpers/receiver.ts';
import { startWholeService } from '../helpers/whole-service.ts';

/*
 * Valid and invalid requests, generated from the description, to the whole service. `FUZZ_REQUESTS=100000` makes it
 * long, `FUZZ_SEED` another; a failure shows the request and its answer.
 */

const REQUESTS = Number(process.env['FUZZ_REQUESTS'] ?? 3_000);
const SEED = Number(process.env['FUZZ_SEED'] ?? 20_261_121);
const AT_ONCE = 100;
const TIMEOUT_MS = 300_000 + REQUESTS * 10;

t.setTimeout(TIMEOUT_MS);

t.test('every answer conforms to the OpenAPI description', { timeout: TIMEOUT_MS }, async (t) => {
  const service = await startWholeService(t, {
    rateLimit: { limit: 1_000_000, windowMs: 1_000 },
    webhookTimeoutMs: 500,
    maxQueued: 20,
  });
  const receiver = await startReceiver(t);
  const projects = [
    await service.project({ name: 'runs' }),
    await service.project({ name: 'reported', command: null }),
    await service.project({ name: 'paused' }),
    await service.project({ name: 'archived' }),
    await service.project({ name: 'seen by nobody' }),
  ];
  const [runs, reported, paused, archived] = projects;
  if (runs === undefined || reported === undefined || paused === undefined || archived === undefined)
    throw new Error();
  await service.admin.writer.write('projects.setStatus', { id: paused, status: 'paused' });
  await service.admin.writer.write('projects.archive', { id: archived });
  const visible = { allProjects: false, projectIds: [runs, reported, paused, archived] };
  const all = await service.key(visible);
  const readOnly = await service.key({ ...visible, scopes: ['projects:read', 'deployments:read'] });
  const blind = await service.key({ allProjects: false, projectIds: [] });
  const revoked = await service.key(visible);
  await service.admin.writer.write('keys.revoke', { id: revoked.keyId });

  const pool: Pool = { ids: new Map([['prj', [...projects]]]), cursors: [] };
  const client = createFuzzClient(service.url, AT_ONCE);
  t.teardown(client.close);
  const requests = fuzzRequests(service.contract.document, pool, {
    keys: [all.secret, readOnly.secret, blind.secret, revoked.secret],
    urls: [
      receiver.url,
      `${receiver.url}/${'x'.repeat(300)}`,
      'https://hooks.invalid/davit?x=%20',
      'https://bücher.invalid/',
      'https://hooks.invalid/a|b?{x}%zz',
    ],
  });
  const statuses = new Map<string, Map<number, number>>();

  const { errorInstance, seed } = await fc.check(
    fc.asyncProperty(fc.array(requests, { minLength: AT_ONCE, maxLength: AT_ONCE }), async (batch) => {
      await Promise.all(batch.map(sendAndJudge));
    }),
    { seed: SEED, numRuns: Math.ceil(REQUESTS / AT_ONCE), endOnFailure: true },
  );

  t.equal(errorInstance, null, `with FUZZ_SEED=${seed}: ${errorInstance}`);

  t.test('every operation was carried out and rejected at least once', async (t) => {
    for (const [operation, counts] of [...statuses].sort()) {
      const met = [...counts.keys()];
      t.ok(
        met.some((status) => status < 300),
        `${operation} was carried out: ${[...counts].join(' ')}`,
      );
      t.ok(
        met.some((status) => status >= 400),
        `${operation} was refused: ${[...counts].join(' ')}`,
      );
    }
    t.equal(statuses.size, 24);
  });

  t.test('davit is ready, its file intact, and no archived or invisible project was deployed', async (t) => {
    while ((await fetch(`${service.url}/readyz`)).status !== 200);
    t.strictSame(service.query('PRAGMA integrity_check'), [{ integrity_check: 'ok' }]);
    t.strictSame(
      service.query('SELECT 1 FROM deployments WHERE project_id IN (?, ?)', projects[3], projects[4]),
      [],
    );
  });

  async function sendAndJudge(request: FuzzRequest): Promise<void> {
    const exchange = await client.send(request);
    remember(pool, exchange.body);
    const counts = statuses.get(request.operation) ?? new Map<number, number>();
    counts.set(exchange.status, (counts.get(exchange.status) ?? 0) + 1);
    if (request.operation !== '') statuses.set(request.operation, counts);
    const problems = [...service.contract.problems(exchange), ...surprises(request, exchange)];
    if (problems.length > 0)
      throw new Error(`${problems.join('; ')}\n${shown(request)}\n${exchange.status} ${exchange.body}`);
  }

  /** Where the answer contradicts what the description says of the request. */
  function surprises({ operation, headers, verdict }: FuzzRequest, { status, body }: Exchange): string[] {
    // On a busy machine a loop may be late, and davit not ready.
    if (status === 503 && operation === 'GET /readyz') return [];
    if (status >= 500) return [`no request may cause ${status}`];
    if (operation.endsWith('/v2/openapi.json') || operation.endsWith('z')) return [];
    if (headers['authorization'] !== `Bearer ${all.secret}`)
      return status < 300 && verdict === 'refused' ? ['it was accepted'] : [];
    if (verdict === 'refused' && status !== 400) return ['the description forbids it'];
    if (verdict === 'allowed' && status === 400 && !isBeyondSchemas(body))
      return ['the description allows it'];
    return [];
  }
});

/** The rules that the description has only in words. */
function isBeyondSchemas(body: string): boolean {
  const { error } = JSON.parse(body) as { error: { details?: { field: string; reason: string }[] } };
  const said = error.details?.map(({ field, reason }) => `${field}: ${reason}`).join('; ') ?? '';
  return /^(cursor: is not a cursor|until: must not be before since|since: must not be in the future|tail: must not be sent together|url: must|outputs\.\w+: must be at most \d+ bytes)/.test(
    said,
  );
}

function shown({ method, path, headers, body }: FuzzRequest): string {
  return JSON.stringify({ method, path, headers, body: body?.slice(0, 2000) });
}
