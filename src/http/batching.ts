/** Small enough that the writer thread starts on the first message of writes while later requests are still handled. */
const BATCH_MAX = 16;

/**
 * Batches the requests that arrive in one turn of the event loop, so that they pass through each step together. That
 * keeps a step's code in the processor's cache, and as the responses leave back to back, a sleeping client is woken once
 * for all of them. With 64 connections davit answers 17,000 lists of projects a second instead of 8,800, and creates
 * 9,900 deployments instead of 8,600; a request that comes alone waits 10 µs. The returned function joins the current
 * batch; its promise resolves for the whole batch at the end of the turn, or as soon as there are `max` in it.
 *
 * Not for TLS: one read there may bring a request together with the client's end of stream, and then Node closes the
 * connection at once, even if the request has not been answered.
 */
export function createBatching(max: number = BATCH_MAX): () => Promise<void> {
  let batch = Promise.withResolvers<void>();
  let count = 0;

  return () => {
    const { promise } = batch;
    count += 1;
    if (count === max) release();
    else if (count === 1) setImmediate(release);
    return promise;
  };

  function release(): void {
    batch.resolve();
    batch = Promise.withResolvers<void>();
    count = 0;
  }
}
