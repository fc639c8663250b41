import { spawn } from 'node:child_process';
import { answerRequests } from './answer.ts';

/** Node's own `spawn` of /bin/true, `concurrency` at a time, in a process with `residentBytes` of memory. */
export interface SpawnsRequest {
  seconds: number;
  concurrency: number;
  residentBytes: number;
}

let ballast = Buffer.alloc(0);

answerRequests(async ({ seconds, concurrency, residentBytes }: SpawnsRequest) => {
  const missingBytes = residentBytes - process.memoryUsage.rss();
  if (missingBytes > ballast.length) ballast = Buffer.alloc(missingBytes, 1);
  const fromMs = performance.now();
  const untilMs = fromMs + seconds * 1000;
  let ended = 0;
  const spawnAgainAndAgain = async () => {
    while (performance.now() < untilMs) {
      await new Promise<void>((resolve, reject) => {
        spawn('/bin/true', { stdio: 'ignore' })
          .on('error', reject)
          .on('exit', () => resolve());
      });
      ended += 1;
    }
  };
  await Promise.all(Array.from({ length: concurrency }, spawnAgainAndAgain));
  return { perSecond: (ended / (performance.now() - fromMs)) * 1000 };
});
