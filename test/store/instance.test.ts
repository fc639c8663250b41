import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { openReads, openStore } from '../../src/store/store.ts';
import { newDeliveries, newWebhook } from '../helpers/deliveries.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { newDeployment, temporaryDirectory, testStore } from '../helpers/store.ts';

t.test('every probe is a commit, so that a disk which takes none is found out', async (t) => {
  const path = `${temporaryDirectory(t)}/davit.db`;
  const store = openStore(path, realEffects);
  const other = openReads(path);
  t.teardown(async () => {
    other.close();
    await store.close();
  });
  const versions = new Set([other.reads.instance.dataVersion()]);
  for (let times = 0; times < 3; times++) {
    await store.writer.write('instance.probe', undefined);
    versions.add(other.reads.instance.dataVersion());
  }
  t.equal(versions.size, 4);
});

t.test('the latest 100 clock settings are kept', async (t) => {
  const store = testStore(t, realEffects);
  t.strictSame(store.reads.instance.clockSettings(0), []);
  for (let atMs = 1; atMs <= 101; atMs++) {
    await store.writer.write('instance.clockWasSet', { atMs, byMs: -atMs });
  }
  const settings = store.reads.instance.clockSettings(101);
  t.equal(settings.length, 100);
  t.strictSame(
    [settings[0], settings[99]],
    [
      { atMs: 2, byMs: -2 },
      { atMs: 101, byMs: -101 },
    ],
  );
});

t.test(
  'an event in the future tells that the clock was set back, unless a setting accounts for it',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const { instance } = store.reads;
    t.equal(instance.setBackMs(0), 0, 'there is no event');
    await newWebhook(store, (await store.key()).keyId);
    await store.writer.write('deployments.create', newDeployment(await store.project()));
    const eventAtMs = effects.now();
    t.equal(instance.setBackMs(eventAtMs - 1_000), 0, 'clocks that are slewed differ as much');
    const nowMs = eventAtMs - 60_000;
    t.equal(instance.setBackMs(nowMs), 60_000);
    const ahead = { atMs: eventAtMs - 5, byMs: 90_000 };
    await store.writer.write('instance.clockWasSet', ahead);
    t.strictSame(instance.clockSettings(nowMs), [ahead, { atMs: nowMs, byMs: -60_000 }]);
    const setBack = { atMs: nowMs, byMs: -60_000 };
    await store.writer.write('instance.clockWasSet', setBack);
    t.equal(instance.setBackMs(nowMs), 0);
    t.strictSame(instance.clockSettings(nowMs), [ahead, setBack]);
    effects.advance(120_000);
    await store.writer.write('deployments.create', newDeployment(await store.project()));
    t.equal(instance.setBackMs(nowMs), 180_000, 'it accounts for no later event');
  },
);

t.test(
  'a setting in the future tells that the clock was set back, also if an older one accounts for the events',
  async (t) => {
    const effects = fakeEffects();
    const store = testStore(t, effects);
    const { instance } = store.reads;
    await newWebhook(store, (await store.key()).keyId);
    await store.writer.write('deployments.create', newDeployment(await store.project()));
    const eventAtMs = effects.now();
    const earlier = { atMs: eventAtMs - 700_000, byMs: 5_000 };
    const setBack = { atMs: eventAtMs - 600_000, byMs: -600_000 };
    const ahead = { atMs: eventAtMs - 400_000, byMs: 200_000 };
    for (const setting of [earlier, setBack, ahead]) {
      await store.writer.write('instance.clockWasSet', setting);
    }
    t.equal(instance.setBackMs(ahead.atMs), 0);
    const nowMs = ahead.atMs - 150_000;
    t.equal(instance.setBackMs(nowMs), 150_000);
    t.strictSame(instance.clockSettings(nowMs), [earlier, setBack, ahead, { atMs: nowMs, byMs: -150_000 }]);
  },
);

t.test('an attempt in the future tells that the clock was set back, as an event does', async (t) => {
  const effects = fakeEffects();
  const store = testStore(t, effects);
  const { instance } = store.reads;
  const { id } = await newWebhook(store, (await store.key()).keyId);
  await newDeliveries(store, id, 1);
  const attempt = (number: number) =>
    store.execute(`
      INSERT INTO attempts (delivery_id, number, at, duration_ms, trigger)
      SELECT id, ${number}, ${effects.now()}, 0, 'schedule' FROM deliveries`);
  effects.advance(90_000);
  attempt(1);
  effects.jump(-60_000);
  t.equal(instance.setBackMs(effects.now()), 60_000);
  attempt(2);
  t.equal(instance.setBackMs(effects.now()), 0, 'the latest one tells');
});
