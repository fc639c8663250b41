import { mkdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import type { Bench, Contender, Missing } from '../measure.ts';
import { findProgram, freePort, monotonicMs, outputOf, start } from '../processes.ts';

/** Runs for each second of a round; laminar starts them one by one. */
const RUNS_PER_SECOND = 100;

/** laminar, a small continuous integration service that records its runs; or why it cannot take part. */
export async function laminar(
  { directory, defer, seconds }: Bench,
  name: string,
  concurrency: number,
): Promise<Contender<'perSecond'> | Missing> {
  const server = findProgram('laminard');
  const client = findProgram('laminarc');
  if (server === undefined || client === undefined) {
    return { name, missing: 'laminar is not installed: see https://laminar.ohwg.net' };
  }
  const home = join(directory, 'laminar');
  mkdirSync(join(home, 'cfg/jobs'), { recursive: true });
  mkdirSync(join(home, 'cfg/contexts'));
  symlinkSync('/bin/true', join(home, 'cfg/jobs/true.run'));
  writeFileSync(join(home, 'cfg/contexts/default.conf'), `EXECUTORS=${concurrency}\n`);
  const place = `127.0.0.1:${await freePort()}`;
  const environment = { PATH: '/usr/bin:/bin', LAMINAR_HOME: home };
  const running = start(server, [], {
    stdio: 'ignore',
    env: { ...environment, LAMINAR_BIND_RPC: place, LAMINAR_BIND_HTTP: `127.0.0.1:${await freePort()}` },
  });
  defer(() => running.stop());
  await delay(1_000);
  const runs = Math.ceil(seconds * RUNS_PER_SECOND);
  return {
    name,
    async run() {
      const fromMs = monotonicMs();
      // `run` starts them all and waits until the last has ended.
      await outputOf(client, ['run', ...Array.from({ length: runs }, () => 'true')], {
        env: { ...environment, LAMINAR_HOST: place },
      });
      return { perSecond: (runs / (monotonicMs() - fromMs)) * 1000 };
    },
  };
}
