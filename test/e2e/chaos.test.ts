import { spawn } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import t from 'tap';
import { executablePath } from '../helpers/executable.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/* `npm run chaos` for some seconds, with the faults that need neither root nor anything installed. */

const SCRIPT = join(import.meta.dirname, '../../scripts/chaos/main.ts');
const FAULTS = [
  'kill',
  'kill-starting',
  'kill-stopping',
  'terminate',
  'freeze',
  'second-serve',
  'vanish',
  'slow-clients',
];

t.test('in a short chaos run davit loses nothing that it has acknowledged', async (t) => {
  executablePath();
  const directory = temporaryDirectory(t);
  const words = ['--minutes', '0.12', '--seed', '1', '--faults', FAULTS.join(','), '--directory', directory];
  const { exitCode, stdout, stderr } = await run([...words, '--json']);
  const figures = JSON.parse(stdout);
  t.strictSame(figures.violations, [], stderr);
  t.equal(exitCode, 0);
  t.equal(figures.losses, 0);

  t.strictSame(Object.keys(figures.faults).sort(), FAULTS.toSorted());
  t.strictSame(figures.skipped, {});
  t.ok(figures.kills >= 3);
  t.ok(figures.restarts.count >= 4);
  // Far less than what a machine does that is not busy.
  for (const [what, least] of Object.entries({ acknowledged: 10, checked: 10, repeated: 1 })) {
    t.ok(figures.writes[what] >= least, `${figures.writes[what]} writes ${what}`);
  }
  t.ok(figures.deployments.commands_run >= 1, `${figures.deployments.commands_run} commands`);
  t.ok(figures.deliveries.delivered >= 10, `${figures.deliveries.delivered} deliveries`);
  t.ok(figures.deliveries.signatures_verified >= figures.deliveries.delivered);
  t.ok(figures.backups.verified >= 1);
  t.strictSame(JSON.parse(readFileSync(join(directory, 'chaos.json'), 'utf8')), figures);
  t.strictSame(readdirSync(directory), ['chaos.json'], 'nothing is kept of a run without losses');
});

t.test('wrong options of the chaos script are refused with its usage', async (t) => {
  for (const words of [['--minutes', 'x'], ['--seed', '1.5'], ['--faults', 'flood,fire'], ['--other']]) {
    t.match(await run(words), { exitCode: 2, stdout: '', stderr: /^usage: npm run chaos -- / });
  }
});

async function run(words: string[]): Promise<{ exitCode: number | null; stdout: string; stderr: string }> {
  const child = spawn(process.execPath, [SCRIPT, ...words], { stdio: ['ignore', 'pipe', 'pipe'] });
  t.teardown(() => child.kill('SIGTERM'));
  const ended = new Promise((resolve) => child.once('close', resolve));
  const [stdout, stderr] = await Promise.all([text(child.stdout), text(child.stderr)]);
  await ended;
  return { exitCode: child.exitCode, stdout, stderr };
}
