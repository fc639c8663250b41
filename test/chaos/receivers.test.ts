import { createHmac } from 'node:crypto';
import t from 'tap';
import { signatureProblem } from '../../scripts/chaos/receivers.ts';
import { judgeMemory } from '../../scripts/chaos/report.ts';
import { signedHeaders } from '../../src/deliver/sign.ts';

const SECRET = `whsec_${Buffer.alloc(32, 7).toString('base64')}`;
const OTHER = `whsec_${Buffer.alloc(32, 8).toString('base64')}`;
const BODY = '{"id":"evt_1"}';

t.test('altered, foreign and missing signatures are problems', async (t) => {
  const headers = headersOf(SECRET);
  t.equal(signatureProblem({ headers, body: BODY }, [OTHER, SECRET]), undefined);
  t.match(signatureProblem({ headers, body: BODY }, [OTHER]), /no v1/);
  t.match(signatureProblem({ headers, body: '{"id":"evt_1" }' }, [SECRET]), /no v1/);
  t.match(signatureProblem({ headers: {}, body: BODY }, [SECRET]), /another form/);
  const alien = { ...headers, 'webhook-id': 'evt_2' };
  t.match(signatureProblem({ headers: alien, body: BODY }, [SECRET]), /webhook-id/);
  const digest = createHmac('sha256', 'x').digest('base64');
  const forged = { ...headers, 'webhook-signature': `v1,${digest}` };
  t.match(signatureProblem({ headers: forged, body: BODY }, [SECRET]), /webhook-signature/);
});

t.test('growth of memory, descriptors and connections is found, but not in a short life', async (t) => {
  const life = (length: number, bytesEach: number, descriptorsEach: number, connectionsEach = 0) => ({
    samples: Array.from({ length }, (_, index) => ({
      residentBytes: 100_000_000 + index * bytesEach,
      descriptors: 40 + index * descriptorsEach,
      connections: (index % 10 === 0 ? 100 : 10) + index * connectionsEach,
    })),
  });
  t.strictSame(judgeMemory([life(150, 0, 0)]), {
    memory: [{ seconds: 75, resident_mb: [100, 100], descriptors: [40, 40], connections: [100, 10] }],
    violations: [],
  });
  t.equal(judgeMemory([life(150, 2_000_000, 0)]).violations.length, 1);
  t.equal(judgeMemory([life(150, 0, 1)]).violations.length, 1);
  t.equal(judgeMemory([life(150, 0, 0, 3)]).violations.length, 1);
  t.strictSame(judgeMemory([life(100, 2_000_000, 1, 3)]), { memory: [], violations: [] });
});

function headersOf(secret: string): Record<string, string> {
  const headers = signedHeaders({
    eventId: 'evt_1',
    secrets: [secret],
    atSeconds: 1_700_000_000,
    body: BODY,
  });
  return Object.fromEntries(Object.entries(headers).map(([name, value]) => [name.toLowerCase(), value]));
}
