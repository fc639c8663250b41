import { createCipheriv, createDecipheriv, createSecretKey } from 'node:crypto';
import type { Page } from '../domain.ts';
import type { Effects } from '../effects.ts';
import { type AppError, invalid } from '../errors.ts';

/** What a cursor goes on with: a list, its filters, and who walks it. Any other use of it is refused. */
export interface Walk {
  list: string;
  filters: Record<string, unknown>;
  keyId: string;
}

export interface Pages {
  /** The seq to go on from; `start` without a cursor. Throws `invalid_request` for a cursor that is not of this walk. */
  position(walk: Walk, cursor: string | undefined, start: number): number;
  /** `rows` holds one more than `limit` where the list goes on. */
  page<Item>(walk: Walk, rows: { seq: number; item: Item }[], limit: number): Page<Item>;
  /** For a list that knows itself where it goes on; null: it has ended. */
  stretch<Item>(walk: Walk, items: Item[], goOnAt: number | null): Page<Item>;
}

const NONCE_BYTES = 12;
const POSITION_BYTES = 8;
const TAG_BYTES = 16;
const CURSOR_BYTES = NONCE_BYTES + POSITION_BYTES + TAG_BYTES;

/**
 * Cursors are sealed with AES-256-GCM: authenticated, and encrypted because a position counts the rows of
 * everybody, those that this key cannot see too. `secret`: 32 bytes, kept in the file.
 */
export function createPages(secret: Buffer, effects: Effects): Pages {
  // Made once: from the bytes, Node makes it anew each time, in 40 µs.
  const key = createSecretKey(secret);
  return {
    position(walk, cursor, start) {
      return cursor === undefined ? start : open(walk, cursor);
    },

    page(walk, rows, limit) {
      const shown = rows.slice(0, limit);
      const last = shown.at(-1);
      return {
        data: shown.map(({ item }) => item),
        next_cursor: rows.length > limit && last !== undefined ? seal(walk, last.seq) : null,
      };
    },

    stretch(walk, items, goOnAt) {
      return { data: items, next_cursor: goOnAt === null ? null : seal(walk, goOnAt) };
    },
  };

  function seal(walk: Walk, seq: number): string {
    const nonce = effects.randomBytes(NONCE_BYTES);
    const cipher = createCipheriv('aes-256-gcm', key, nonce);
    cipher.setAAD(identity(walk));
    const position = Buffer.alloc(POSITION_BYTES);
    position.writeBigUInt64BE(BigInt(seq));
    return Buffer.concat([nonce, cipher.update(position), cipher.final(), cipher.getAuthTag()]).toString(
      'base64url',
    );
  }

  function open(walk: Walk, cursor: string): number {
    const sealed = Buffer.from(cursor, 'base64url');
    // Buffer forgives letters that are not base64url: only the very text that was handed out counts.
    if (sealed.length !== CURSOR_BYTES || sealed.toString('base64url') !== cursor) throw wrongCursor();
    const decipher = createDecipheriv('aes-256-gcm', key, sealed.subarray(0, NONCE_BYTES), {
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
