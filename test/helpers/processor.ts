/**
 * What `action` takes of a processor, in milliseconds, on the average of 30 times: by a clock it would take what others
 * run meanwhile too. One time is too short for that, as a system may count in steps of 10 ms.
 */
export function processorMs(action: () => void): number {
  action(); // what is compiled at first is not counted
  const begun = process.threadCpuUsage();
  for (let time = 0; time < 30; time++) action();
  const { user, system } = process.threadCpuUsage(begun);
  return (user + system) / 30_000;
}
