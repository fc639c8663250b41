/**
 * A host without an address. Its first label is longer than the 63 letters of RFC 1035, so DNS is not asked: that may be
 * out of reach, or have an answer to everything.
 */
export const NOWHERE = `${'nowhere'.repeat(10)}.invalid`;
