import type { KeyId } from '../domain.ts';
import type { Caller } from './keys.ts';

/** Who looks at the file itself, for reads that are made for callers: sees every project, and there is no such key. */
export const ADMINISTRATOR: Caller = {
  keyId: 'key_' as KeyId,
  scopes: [],
  allProjects: true,
  lastUsedAtMs: null,
};
