import t from 'tap';
import { openForWriting } from '../../src/store/database.ts';
import { eventWrites } from '../../src/store/events.ts';
import { fakeEffects } from '../helpers/effects.ts';
import { preparedBy, temporaryDirectory } from '../helpers/store.ts';

t.test('an event looks for webhooks of keys that see its project, and at each key once', async (t) => {
  const database = openForWriting(`${temporaryDirectory(t)}/davit.db`, fakeEffects());
  t.teardown(() => database.close());
  const plans: { id: number; parent: number; detail: string }[][] = [];
  const spied = preparedBy(database, (sql) => {
    if (sql.includes('webhook_subscriptions')) {
      const named = { type: 'deployment.failed', projectId: 'prj_1', at: 1 };
      plans.push(database.prepare<[object], (typeof plans)[0][0]>(`EXPLAIN QUERY PLAN ${sql}`).all(named));
    }
    return database.prepare(sql);
  });
  eventWrites({ database: spied, effects: fakeEffects(), changed: () => undefined });
  t.equal(plans.length, 1);
  const [plan = []] = plans;
  t.strictSame(
    plan.filter(({ parent }) => parent === 0).map(({ detail }) => detail),
    [
      'CO-ROUTINE seeing',
      'SCAN seeing',
      'SEARCH w USING INDEX webhooks_of_key (key_id=?)',
      'SEARCH s USING COVERING INDEX webhook_subscriptions_of_webhook (webhook_id=? AND event_type=?)',
    ],
  );
  t.strictSame(
    plan
      .map(({ detail }) => detail)
      .filter((detail) => /^(SCAN|SEARCH) (keys|k|key_projects|p)\b|TEMP/.test(detail)),
    [
      'SCAN keys USING INDEX keys_of_all_projects',
      'SEARCH p USING COVERING INDEX key_projects_of_project (project_id=?)',
      'SEARCH k USING INDEX sqlite_autoindex_keys_1 (id=?)',
    ],
  );
});
