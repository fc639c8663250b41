/** Takes steps, from the beginning, which is null, and then from where the one before ended, until one ends with null. */
export async function inSteps<Place>(step: (after: Place | null) => Promise<Place | null>): Promise<void> {
  let after: Place | null = null;
  do after = await step(after);
  while (after !== null);
}
