import fc from 'fast-check';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { createAnswers } from '../../src/http/answers.ts';
import { deployments } from '../../src/http/deployments.ts';
import { createPages } from '../../src/http/pages.ts';
import { createRateLimiter, type RateDecision } from '../../src/http/rate-limits.ts';
import { createWatches } from '../../src/http/watches.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { requestJson, startHttp } from '../helpers/http.ts';

t.test('a caller may use its limit in a burst, and regains it evenly over the window', (t) => {
  const effects = fakeEffects();
  const limiter = createRateLimiter({ limit: 3, windowMs: 30_000 }, effects);
  const policy = '"default";q=3;w=30';
  const allowed = (remaining: number, moreInSeconds: number): RateDecision => ({
    kind: 'allowed',
    headers: { 'RateLimit-Policy': policy, RateLimit: `"default";r=${remaining};t=${moreInSeconds}` },
  });
  const limited = (retryAfterSeconds: number): RateDecision => ({
    kind: 'limited',
    headers: { 'RateLimit-Policy': policy, RateLimit: `"default";r=0;t=${retryAfterSeconds}` },
    retryAfterSeconds,
  });

  t.strictSame(limiter.take('a'), allowed(2, 10));
  t.strictSame(limiter.take('a'), allowed(1, 10));
  t.strictSame(limiter.take('a'), allowed(0, 10));
  t.strictSame(limiter.take('a'), limited(10));
  t.strictSame(limiter.take('b'), allowed(2, 10), 'another caller has its own limit');
  effects.advance(9_001);
  t.strictSame(limiter.take('a'), limited(1), 'a limited request costs nothing');
  effects.advance(999);
  t.strictSame(limiter.take('a'), allowed(0, 10));
  effects.advance(15_000);
  t.strictSame(limiter.take('a'), allowed(0, 5), 'half a request remains, which is not one yet');
  effects.advance(3_600_000);
  t.strictSame(limiter.take('a'), allowed(2, 10), 'no more than the limit is saved up');
  t.end();
});

t.test('a caller that waits for Retry-After is let through', (t) => {
  const limits = fc.record({
    limit: fc.integer({ min: 1, max: 5_000 }),
    windowMs: fc.integer({ min: 1, max: 86_400_000 }),
  });
  const gaps = fc.array(fc.double({ min: 0, max: 5_000, noNaN: true }), { maxLength: 30 });
  fc.assert(
    fc.property(limits, gaps, ({ limit, windowMs }, gapsMs) => {
      const effects = fakeEffects();
      const limiter = createRateLimiter({ limit: Math.min(limit, 20), windowMs }, effects);
      for (const gapMs of gapsMs) {
        effects.advance(gapMs);
        const decision = limiter.take('a');
        if (decision.kind !== 'limited') continue;
        if (decision.retryAfterSeconds < 1 || !Number.isInteger(decision.retryAfterSeconds)) return false;
        effects.advance(decision.retryAfterSeconds * 1000);
        if (limiter.take('a').kind !== 'allowed') return false;
      }
      return true;
    }),
    // A moment with which the sums of floating-point numbers are a little too large.
    { examples: [[{ limit: 3, windowMs: 6_000 }, [2942.9345149000405, 0, 0, 0]]] },
  );
  t.end();
});

t.test('at most twice the limit passes within one window', (t) => {
  const effects = fakeEffects();
  const limiter = createRateLimiter({ limit: 600, windowMs: 60_000 }, effects);
  let through = 0;
  for (let ms = 0; ms < 60_000; ms += 10) {
    if (limiter.take('a').kind === 'allowed') through++;
    effects.advance(10);
  }
  t.ok(through <= 1_200 && through >= 1_199, String(through));
  t.end();
});

t.test('a clock that is set back locks no caller out', (t) => {
  const effects = fakeEffects();
  const limiter = createRateLimiter({ limit: 1, windowMs: 1_000 }, effects);
  t.equal(limiter.take('a').kind, 'allowed');
  effects.jump(-86_400_000);
  effects.advance(1_000);
  t.equal(limiter.take('a').kind, 'allowed');
  t.end();
});

t.test('beyond the maximum of callers, the one that was quiet for longest is forgotten', (t) => {
  const effects = fakeEffects();
  const limiter = createRateLimiter({ limit: 1, windowMs: 60_000 }, effects, { maxCallers: 2 });
  t.equal(limiter.take('a').kind, 'allowed');
  t.equal(limiter.take('b').kind, 'allowed');
  t.equal(limiter.take('c').kind, 'allowed');
  t.equal(limiter.take('b').kind, 'limited');
  t.equal(limiter.take('c').kind, 'limited');
  t.equal(limiter.take('a').kind, 'allowed', 'forgotten');
  t.end();
});

t.test('a caller that keeps asking is not forgotten before one that was quiet for longer', (t) => {
  const effects = fakeEffects();
  const limiter = createRateLimiter({ limit: 2, windowMs: 60_000 }, effects, { maxCallers: 2 });
  for (const who of ['busy', 'quiet', 'busy', 'third']) t.equal(limiter.take(who).kind, 'allowed');
  t.equal(limiter.take('busy').kind, 'limited');
  t.end();
});

t.test('without a limit every request is let through', (t) => {
  const limiter = createRateLimiter(null, fakeEffects());
  for (let count = 0; count < 10_000; count++) limiter.take('a');
  t.strictSame(limiter.take('a'), { kind: 'unlimited' });
  t.end();
});

t.test('a key beyond its rate limit is answered 429 with Retry-After', async (t) => {
  const effects = fakeEffects();
  const { port, store } = await startHttp(t, {
    effects,
    rateLimit: { limit: 2, windowMs: 60_000 },
    resources: () => [
      {
        name: 'open',
        register(server) {
          server.route({ method: 'GET', path: '/v2/open', handler: () => ({}) });
          server.route({
            method: 'POST',
            path: '/v2/scoped',
            options: { auth: { scope: 'logs:read' } },
            handler: () => ({}),
          });
        },
      },
    ],
  });
  const { secret: key } = await store.key({ scopes: ['projects:read'] });
  const other = await store.key();

  const first = await requestJson(port, 'GET', '/v2/open', { key });
  t.equal(first.headers.get('ratelimit-policy'), '"default";q=2;w=60');
  t.equal(first.headers.get('ratelimit'), '"default";r=1;t=30');
  t.equal((await requestJson(port, 'POST', '/v2/scoped', { key })).status, 403, 'a rejection counts too');

  const limited = await requestJson(port, 'POST', '/v2/scoped?unknown=1', { key });
  t.equal(limited.status, 429, 'the rate is checked before the scope and the query');
  t.match(limited.body, { error: { code: 'rate_limited' } });
  t.equal(limited.headers.get('retry-after'), '30');
  t.equal(limited.headers.get('ratelimit'), '"default";r=0;t=30');
  t.equal((await requestJson(port, 'GET', '/v2/open', { key: other.secret })).status, 200);

  effects.advance(30_000);
  t.equal((await requestJson(port, 'GET', '/v2/open', { key })).status, 200);
});

t.test('answers 500 and 503 have the RateLimit headers too', async (t) => {
  const pages = createPages(Buffer.alloc(32), realEffects);
  const { port, store } = await startHttp(t, {
    rateLimit: { limit: 1_000, windowMs: 60_000 },
    resources: (store) => {
      const watches = createWatches(store.writer, realEffects);
      t.teardown(watches.close);
      return [deployments(store.reads, createAnswers(store.writer), pages, watches, realEffects, null)];
    },
  });
  const { secret: key } = await store.key();
  const path = `/v2/projects/${await store.project()}/deployments`;
  const deploy = () => requestJson(port, 'POST', path, { key, body: { ref: 'main' } });

  store.limitPages(true);
  let full = await deploy();
  while (full.status === 201) full = await deploy();
  t.equal(full.status, 503);
  t.match(full.headers.get('ratelimit'), /^"default";r=\d+;t=\d+$/);
  const before = store.dump();
  t.equal((await deploy()).status, 503);
  t.strictSame(store.dump(), before);

  store.limitPages(false);
  store.execute('ALTER TABLE events RENAME TO lost');
  const bug = await deploy();
  t.match(bug, { status: 500, body: { error: { code: 'internal_error' } } });
  t.match(bug.headers.get('ratelimit'), /^"default";r=\d+;t=\d+$/);
});

t.test(
  'failed authentications are limited by address, but a valid key from the address is still accepted',
  async (t) => {
    const effects = fakeEffects();
    const { port, store } = await startHttp(t, {
      effects,
      resources: () => [
        {
          name: 'open',
          register: (server) => server.route({ method: 'GET', path: '/v2/open', handler: () => ({}) }),
        },
      ],
    });
    const { secret } = await store.key();
    const statusOf = async (key?: string) =>
      (await requestJson(port, 'GET', '/v2/open', key === undefined ? {} : { key })).status;

    const statuses = new Set<number>();
    for (let attempt = 0; attempt < 60; attempt++) statuses.add(await statusOf('davit_wrong'));
    t.strictSame([...statuses], [401]);
    const limited = await requestJson(port, 'GET', '/v2/open');
    t.match(limited, { status: 429, body: { error: { code: 'rate_limited' } } });
    t.equal(limited.headers.get('ratelimit-policy'), '"failed-authentication";q=60;w=60');
    t.equal(await statusOf(secret), 200);
    effects.advance(Number(limited.headers.get('retry-after')) * 1000);
    t.equal(await statusOf('davit_wrong'), 401);
  },
);

t.test('a bounded number of callers is remembered', (t) => {
  const limiter = createRateLimiter({ limit: 60, windowMs: 60_000 }, fakeEffects());
  for (let attempt = 0; attempt < 60; attempt++) limiter.take('192.0.2.1');
  t.equal(limiter.take('192.0.2.1').kind, 'limited');
  for (let address = 0; address < 10_000; address++) limiter.take(`2001:db8:${address.toString(16)}::/64`);
  t.equal(limiter.take('192.0.2.1').kind, 'allowed', 'forgotten');
  t.end();
});
