import type { Test } from 'tap';
import type { KeyId } from '../../src/domain.ts';
import { requestJson } from './http.ts';
import type { TestStore } from './store.ts';

/** A request that is refused; `place` is what its path is made of, `key` whose it is: the owner's unless it is said. */
export interface Refusal<Place, Key extends string> {
  name: string;
  method: string;
  path: (place: Place) => string;
  body?: unknown;
  key?: Key | 'nobody';
  expected: { status: number; code: string; details?: [field: string, reason: string | RegExp][] };
}

/** What is answered to a request with these mistakes. */
export function malformed(
  ...details: [field: string, reason: string | RegExp][]
): Refusal<never, never>['expected'] {
  return { status: 400, code: 'invalid_request', details };
}
export const forbidden = { status: 403, code: 'forbidden' };
export const missing = { status: 404, code: 'not_found' };

/** Each of them in a test of its own, after which the file is as it was. */
export async function testRefusals<Place, Key extends string>(
  t: Test,
  refusals: readonly Refusal<Place, Key | 'owner'>[],
  place: Place,
  {
    http,
    store,
    keys,
  }: { http: number; store: TestStore; keys: Record<Key | 'owner', { keyId: KeyId; secret: string }> },
): Promise<void> {
  const [read] = refusals.filter(({ method }) => method === 'GET');
  for (const { secret } of Object.values<{ secret: string }>(keys)) {
    await requestJson(http, 'GET', read?.path(place) ?? '', { key: secret });
  }
  await store.writer.write('instance.probe', undefined); // after it, the use of the keys is noted
  const before = store.dump();
  for (const { name, method, path, body, key = 'owner', expected } of refusals) {
    await t.test(name, async (t) => {
      const response = await requestJson(http, method, path(place), {
        ...(key === 'nobody' ? {} : { key: keys[key].secret }),
        ...(body === undefined ? {} : { body }),
      });
      t.equal(response.status, expected.status);
      const details = expected.details?.map(([field, reason]) => ({ field, reason }));
      t.match(response.body, {
        error: { code: expected.code, ...(details === undefined ? {} : { details }) },
      });
      t.strictSame(store.dump(), before);
    });
  }
}
