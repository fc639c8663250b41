import t from 'tap';
import { newDeployment, testStore } from '../helpers/store.ts';

t.test('a command that deployments wait for cannot be taken away', async (t) => {
  const store = testStore(t);
  const id = await store.project();
  await store.writer.write('deployments.create', newDeployment(id));
  const before = store.dump();
  const takeAway = () =>
    store.writer.write('projects.set', {
      id,
      changes: { command: null },
      variables: { A: '1' },
      unsetVariables: [],
    });
  await t.rejects(takeAway(), { code: 'conflict', message: /\(1\)/ });
  t.strictSame(store.dump(), before);
  await store.writer.write('deployments.claim', undefined);
  t.match(await takeAway(), { command: null, variable_names: ['A'] });
});
