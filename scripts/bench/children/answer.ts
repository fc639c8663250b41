/** Answers the requests of the benchmark, whose `childOf` started this process, and ends with it. */
export function answerRequests<Request>(answer: (request: Request) => Promise<unknown>): void {
  process.on('message', ({ id, request }: { id: number; request: Request }) => {
    answer(request).then(
      (result) => process.send?.({ id, answer: result }),
      (error: unknown) =>
        process.send?.({
          id,
          problem: error instanceof Error ? (error.stack ?? error.message) : String(error),
        }),
    );
  });
  process.on('disconnect', () => process.exit());
}
