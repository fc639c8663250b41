import { readFileSync } from 'node:fs';
import fc from 'fast-check';
import { Webhook } from 'standardwebhooks';
import Stripe from 'stripe';
import t from 'tap';
import {
  serviceSignature,
  signedHeaders,
  standardSignature,
  type Verification,
  verify,
} from '../../src/deliver/sign.ts';
import { realEffects } from '../../src/effects.ts';
import { newSigningSecret } from '../../src/secrets.ts';

interface Vector {
  secret: string;
  t: number;
  body: string;
  header: string;
  standard: { id: string; signature: string };
}
const {
  valid: vectors,
  tolerance_seconds: toleranceSeconds,
}: { valid: Vector[]; tolerance_seconds: number } = JSON.parse(
  readFileSync(`${import.meta.dirname}/../vectors/signatures.json`, 'utf8'),
);

const SECRET = newSigningSecret(realEffects.randomBytes);
const OTHER_SECRET = newSigningSecret(realEffects.randomBytes);
const BODY = '{"id":"evt_1","ref":"café 🚀"}';
const AT_SECONDS = 1_795_248_930;
const HEADER = serviceSignature([SECRET], AT_SECONDS, BODY);

/** What the reference verifier says of a good delivery with these changes. */
function verdict(changes: Partial<Verification> = {}) {
  return verify({ secret: SECRET, header: HEADER, body: BODY, nowSeconds: AT_SECONDS, ...changes });
}

t.test('signatures match the test vectors', async (t) => {
  for (const { secret, t: atSeconds, body, header, standard } of vectors) {
    for (const bytes of [body, Buffer.from(body)]) {
      t.equal(serviceSignature([secret], atSeconds, bytes), header);
      t.equal(standardSignature([secret], standard.id, atSeconds, bytes), standard.signature);
      t.same(verify({ secret, header, body: bytes, nowSeconds: atSeconds }), { ok: true });
    }
    t.same(signedHeaders({ eventId: standard.id, secrets: [secret], atSeconds, body }), {
      'Service-Signature': header,
      'webhook-id': standard.id,
      'webhook-timestamp': String(atSeconds),
      'webhook-signature': standard.signature,
    });
  }
});

t.test('a delivery carries one signature for each live secret', async (t) => {
  const header = serviceSignature([SECRET, OTHER_SECRET], AT_SECONDS, BODY);
  t.match(header, /^t=1795248930,v1=[0-9a-f]{64},v1=[0-9a-f]{64}$/);
  t.same(verdict({ header }), { ok: true });
  t.same(verdict({ header, secret: OTHER_SECRET }), { ok: true });
  t.match(standardSignature([SECRET, OTHER_SECRET], 'evt_1', AT_SECONDS, BODY), /^v1,\S{44} v1,\S{44}$/);
});

t.test('the stripe package accepts Service-Signature', async (t) => {
  const { webhooks } = new Stripe('sk_test_unused');
  const construct = (header: string, secret: string, nowSeconds = AT_SECONDS) =>
    webhooks.constructEvent(BODY, header, secret, toleranceSeconds, undefined, nowSeconds * 1000);
  t.same(construct(HEADER, SECRET), JSON.parse(BODY));
  t.same(construct(serviceSignature([OTHER_SECRET, SECRET], AT_SECONDS, BODY), SECRET), JSON.parse(BODY));
  t.throws(() => construct(HEADER, OTHER_SECRET));
  t.throws(() => construct(HEADER, SECRET, AT_SECONDS + 301));
  const [, digest] = HEADER.split('v1=');
  t.throws(() => construct(`t=${AT_SECONDS + 1},v1=${digest}`, SECRET));
});

t.test('the standardwebhooks package accepts webhook-signature', async (t) => {
  // It compares with the real clock.
  const atSeconds = Math.floor(realEffects.now() / 1000);
  const headers = signedHeaders({ eventId: 'evt_1', secrets: [OTHER_SECRET, SECRET], atSeconds, body: BODY });
  t.same(new Webhook(SECRET).verify(BODY, headers), JSON.parse(BODY));
  t.same(new Webhook(OTHER_SECRET).verify(BODY, headers), JSON.parse(BODY));
  t.throws(() => new Webhook(SECRET).verify(`${BODY} `, headers));
  t.throws(() => new Webhook(newSigningSecret(realEffects.randomBytes)).verify(BODY, headers));
  t.throws(() => new Webhook(SECRET).verify(BODY, { ...headers, 'webhook-id': 'evt_2' }));
});

t.test('the verifier', async (t) => {
  t.test('allows exactly 300 seconds to either side', async (t) => {
    for (const seconds of [-300, -299.5, 0, 300]) {
      t.same(verdict({ nowSeconds: AT_SECONDS + seconds }), { ok: true }, String(seconds));
    }
    for (const seconds of [-301, -300.001, 300.001, 301, Number.NaN, Number.POSITIVE_INFINITY]) {
      t.match(
        verdict({ nowSeconds: AT_SECONDS + seconds }),
        { ok: false, reason: /tolerance/ },
        String(seconds),
      );
    }
    t.same(verdict({ nowSeconds: AT_SECONDS + 10, toleranceSeconds: 10 }), { ok: true });
    t.match(verdict({ nowSeconds: AT_SECONDS + 11, toleranceSeconds: 10 }), { ok: false });
    t.match(verdict({ toleranceSeconds: Number.NaN }), { ok: false });
  });

  t.test('refuses another secret, body or time', async (t) => {
    t.match(verdict({ secret: OTHER_SECRET }), { ok: false, reason: /no signature matches/ });
    t.match(
      verdict({ secret: SECRET.slice('whsec_'.length) }),
      { ok: false },
      'the prefix belongs to the key',
    );
    t.match(verdict({ body: JSON.stringify(JSON.parse(BODY), null, 1) }), { ok: false });
    t.match(verdict({ header: HEADER.replace(`t=${AT_SECONDS}`, `t=${AT_SECONDS + 1}`) }), { ok: false });
  });

  t.test('refuses an empty secret, with which anybody can sign', async (t) => {
    const header = serviceSignature([''], AT_SECONDS, BODY);
    t.match(verdict({ secret: '', header }), { ok: false, reason: /secret is empty/ });
  });

  t.test('ignores schemes that it does not know, and what is no signature', async (t) => {
    for (const header of [
      `${HEADER},v0=abc`,
      `v2=,${HEADER}`,
      HEADER.replace(',', ',v3=a=b,'),
      `${HEADER},V1=x`,
      `${HEADER},v1=00`,
      `v1=,${HEADER},v1`,
      `${HEADER},`,
      `t5,t,${HEADER},=`,
    ]) {
      t.same(verdict({ header }), { ok: true }, header);
    }
    t.match(verdict({ header: HEADER.replace('v1=', 'v2=') }), { ok: false, reason: /no v1/ });
    t.match(verdict({ header: HEADER.replace('v1=', 'v0=') }), { ok: false, reason: /no v1/ });
    t.match(verdict({ header: HEADER.replace('t=', 'T=') }), { ok: false, reason: /no t$/ });
    t.match(verdict({ header: '' }), { ok: false, reason: /is missing/ });
  });

  t.test('finds the one signature of several that matches, wherever it stands', async (t) => {
    const wrong = `v1=${'0'.repeat(64)}`;
    t.same(verdict({ header: `${HEADER},${wrong}` }), { ok: true });
    t.same(verdict({ header: `${wrong},${wrong},${HEADER}` }), { ok: true });
    t.match(verdict({ header: `t=${AT_SECONDS},${wrong},${wrong}` }), { ok: false });
  });

  t.test('reads the header strictly', async (t) => {
    const [, v1 = ''] = HEADER.split(',');
    const at = `t=${AT_SECONDS}`;
    for (const header of [
      undefined,
      '',
      ',',
      at,
      v1,
      `${at},`,
      `${at} ,${v1}`,
      `${at}, ${v1}`,
      `${at};${v1}`,
      `${at},${at},${v1}`,
      `t=,${v1}`,
      `t=-${AT_SECONDS},${v1}`,
      `t=0${AT_SECONDS},${v1}`,
      `t=+${AT_SECONDS},${v1}`,
      `t=${AT_SECONDS}.0,${v1}`,
      `t=1.795248930e9,${v1}`,
      `t=0x6b015be2,${v1}`,
      `t=NaN,${v1}`,
      `t=${'9'.repeat(16)},${v1}`,
      `${at},v1=`,
      `${at},v1=${'g'.repeat(64)}`,
      `${at},${v1}0`,
      `${at},${v1.slice(0, -1)}`,
      `${at},${v1.toUpperCase()}`,
      `${at},v1=${v1.slice(3).toUpperCase()}`,
      `${HEADER}\0`,
      `${HEADER},${'x=y,'.repeat(2_000)}x=y`,
    ]) {
      t.equal(verdict({ header }).ok, false, String(header).slice(0, 120));
    }
  });

  t.test('never throws, and accepts no altered header', async () => {
    fc.assert(
      fc.property(fc.oneof(fc.string({ maxLength: 200 }), fc.string({ unit: 'binary' })), (header) => {
        return !verdict({ header }).ok;
      }),
    );
    const altered = fc.record({
      at: fc.nat(HEADER.length - 1),
      character: fc.string({ minLength: 1, maxLength: 1 }),
    });
    fc.assert(
      fc.property(altered, ({ at, character }) => {
        const header = HEADER.slice(0, at) + character + HEADER.slice(at + 1);
        return verdict({ header }).ok === (header === HEADER);
      }),
    );
  });

  t.test('accepts exactly what was signed', async () => {
    const bytes = fc.uint8Array({ maxLength: 300 });
    const secret = fc.string({ minLength: 1, unit: 'binary' });
    fc.assert(
      fc.property(secret, bytes, bytes, fc.nat(), (secret, body, otherBody, atSeconds) => {
        const header = serviceSignature([secret], atSeconds, body);
        const ok = verify({ secret, header, body, nowSeconds: atSeconds }).ok;
        const otherOk = verify({ secret, header, body: otherBody, nowSeconds: atSeconds }).ok;
        return ok && otherOk === Buffer.from(body).equals(otherBody);
      }),
    );
  });
});
