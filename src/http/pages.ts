import { createCipheriv, createDecipheriv } from 'node:crypto';
import type { Page } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { type AppError, invalid } from '../errors.ts';
import type { ListPage } from '../store/list-page.ts';

/** What a cursor is bound to: a list, its filters, and the key that pages through it. */
export interface Walk {
  list: string;
  filters: Record<string, unknown>;
  keyId: string;
}

export interface Pages {
  /** The seq to continue from; `start` without a cursor. Throws `invalid_request` for a cursor of another walk. */
  position(walk: Walk, cursor: string | undefined, start: number): number;
  /** The page as clients see it, with a cursor for the next one. */
  page<Item>(walk: Walk, page: ListPage<Item>): Page<Item>;
}

const NONCE_BYTES = 12;
const POSITION_BYTES = 8;
const TAG_BYTES = 16;
const CURSOR_BYTES = NONCE_BYTES + POSITION_BYTES + TAG_BYTES;

/**
 * Makes pages whose cursors are sealed with AES-256-GCM: authenticated, and encrypted because a position tells how many
 * rows there are, also those that the key cannot see. `secret`: 32 bytes, kept in the database.
 */
export function createPages(secret: Buffer, effects: Effects): Pages {
  return {
    position(walk, cursor, start) {
      return cursor === undefined ? start : open(walk, cursor);
    },

    page(walk, { items, goOnAt }) {
      return { data: items, next_cursor: goOnAt === null ? null : seal(walk, goOnAt) };
    },
  };

  function seal(walk: Walk, seq: number): string {
    const nonce = effects.randomBytes(NONCE_BYTES);
    const cipher = createCipheriv('aes-256-gcm', secret, nonce);
    cipher.setAAD(identity(walk));
    const position = Buffer.alloc(POSITION_BYTES);
    position.writeBigUInt64BE(BigInt(seq));
    return Buffer.concat([nonce, cipher.update(position), cipher.final(), cipher.getAuthTag()]).toString(
      'base64url',
    );
  }

  function open(walk: Walk, cursor: string): number {
    const sealed = Buffer.from(cursor, 'base64url');
    // Buffer ignores characters that are not base64url, but only the exact text that was handed out is accepted.
    if (sealed.length !== CURSOR_BYTES || sealed.toString('base64url') !== cursor) throw wrongCursor();
    const decipher = createDecipheriv('aes-256-gcm', secret, sealed.subarray(0, NONCE_BYTES), {
      authTagLength: TAG_BYTES,
    });
    decipher.setAAD(identity(walk));
    decipher.setAuthTag(sealed.subarray(-TAG_BYTES));
    try {
      const position = decipher.update(sealed.subarray(NONCE_BYTES, -TAG_BYTES));
      decipher.final();
      return Number(position.readBigUInt64BE());
    } catch {
      throw wrongCursor();
    }
  }
}

function identity(walk: Walk): Buffer {
  return Buffer.from(JSON.stringify([walk.list, walk.keyId, Object.entries(walk.filters).sort()]));
}

function wrongCursor(): AppError {
  return invalid('query', 'cursor', 'is not a cursor of this list and these filters: begin without one');
}
