/** Calls `step` repeatedly, first with null, then with the place that it last returned, until it returns null. */
export async function inSteps<Place>(step: (after: Place | null) => Promise<Place | null>): Promise<void> {
  let after: Place | null = null;
  do after = await step(after);
  while (after !== null);
}
