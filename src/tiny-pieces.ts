const TINY_PIECE_BYTES = 32;

/**
 * Whether a body that is not trusted comes in too many tiny pieces, more than `piecesMax`: each piece costs some
 * microseconds, whatever its size, and one read can bring thousands, as chunks or as records of TLS.
 */
export function areTooTiny(pieces: number, bytes: number, piecesMax: number): boolean {
  return pieces > piecesMax && bytes < pieces * TINY_PIECE_BYTES;
}
