import { existsSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { lockForServing, servedBy } from '../../src/store/lock.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('who has the file is known while it does, and no longer', async (t) => {
  const path = join(temporaryDirectory(t), 'davit.db');
  t.equal(servedBy(path), null);
  t.notOk(existsSync(`${path}-lock`), 'looking makes no lock');

  const release = lockForServing(path, 4711, fakeEffects(), 2);
  t.strictSame(servedBy(path), {
    process_id: 4711,
    since: '2026-11-21T08:00:00.000Z',
    max_concurrent: 2,
  });
  t.throws(() => lockForServing(path, 4712, fakeEffects()), {
    code: 'conflict',
    message: /is served already by process 4711 since 2026-11-21T08:00:00\.000Z/,
  });
  t.match(servedBy(path), { process_id: 4711 }, 'a refusal changes nothing');
  release();
  t.equal(servedBy(path), null, 'what the service wrote outlives it, its lock does not');

  const next = lockForServing(path, 4712, fakeEffects());
  t.match(servedBy(path), { process_id: 4712, max_concurrent: null });
  next();
});
