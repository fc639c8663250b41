/** Why an attempt failed; the message becomes the attempt's `error`. */
export class AttemptError extends Error {
  override readonly name = 'AttemptError';
}

/** The name under which an error is recorded, which groups the system's error codes. */
export function errorName(error: (Error & { code?: string }) | null): string {
  if (error === null) return 'invalid_response';
  if (error instanceof AttemptError) return error.message;
  const { code = 'unknown' } = error;
  switch (code) {
    case 'ECONNREFUSED':
      return 'connection_refused';
    case 'ECONNRESET':
    case 'EPIPE':
      return 'connection_reset';
    case 'ETIMEDOUT':
      return 'timeout';
    case 'EHOSTUNREACH':
    case 'EHOSTDOWN':
    case 'ENETUNREACH':
    case 'ENETDOWN':
      return 'unreachable';
    default:
      return `connection_failed: ${code}`;
  }
}
