import type { KeyId } from '../domain.ts';
import type { Caller } from './keys.ts';

/** The caller for commands that read the file themselves: it sees every project. No key has this id. */
export const ADMINISTRATOR: Caller = {
  keyId: 'key_' as KeyId,
  scopes: [],
  allProjects: true,
  lastUsedAtMs: null,
};
