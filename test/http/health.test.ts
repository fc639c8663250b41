import t from 'tap';
import { health } from '../../src/http/health.ts';
import { requestJson, startHttp } from '../helpers/http.ts';

t.test('probes are answered without a key, whatever parameters they come with', async (t) => {
  let problem: string | null = null;
  const { port } = await startHttp(t, { resources: () => [health(async () => problem)] });
  const answers = async (query: string) => ({
    health: (await requestJson(port, 'GET', `/healthz${query}`)).status,
    readiness: (await requestJson(port, 'GET', `/readyz${query}`)).status,
  });
  for (const query of ['', '?', '?x=1&x=2', '?=1', '?__proto__=1'])
    t.strictSame(await answers(query), { health: 200, readiness: 200 }, query);
  problem = 'the database takes no writes';
  t.strictSame(await answers('?x=1'), { health: 200, readiness: 503 });
  t.match(await requestJson(port, 'GET', '/readyz'), { body: { error: { message: problem } } });
});
