import { createSlots } from '../slots.ts';

/** 1,024 bodies of the largest size. Most are complete as soon as they begin, so only slow ones come to be the oldest. */
const RECEIVE_BUFFER_MAX_BYTES = 64 * 1024 * 1024;

/** Counts the memory of the bodies that are being received. */
export interface ReceiveBuffers {
  /** A body begins; `giveUp` is called if it takes memory for too long. */
  begin(giveUp: () => void): Receiving;
}

interface Receiving {
  add(bytes: number): void;
  /** The body is complete, or given up. */
  end(): void;
}

/**
 * Limits the memory of bodies that are not complete yet: of 4,090 connections without a key, each of which sent all but
 * the last byte of one, they took 470 MB. While they are more than `maxBytes` together, the oldest is given up, so slow
 * clients cannot keep others from sending theirs.
 */
export function createReceiveBuffers(maxBytes: number = RECEIVE_BUFFER_MAX_BYTES): ReceiveBuffers {
  const receiving = createSlots<() => void>();
  let totalBytes = 0;

  return {
    begin(giveUp) {
      const place = receiving.put(giveUp);
      let ownBytes = 0;
      return {
        add(bytes) {
          ownBytes += bytes;
          totalBytes += bytes;
          for (const giveUpOldest of receiving) {
            if (totalBytes <= maxBytes || giveUpOldest === giveUp) return;
            giveUpOldest();
          }
        },
        end() {
          if (receiving.take(place) !== undefined) totalBytes -= ownBytes;
        },
      };
    },
  };
}
