import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { setTimeout as delay } from 'node:timers/promises';
import t from 'tap';
import { whyItMayTake } from '../../src/cli/deployment-logs.ts';
import { resolveDeployment } from '../../src/cli/names.ts';
import type { Deployment, DeploymentId } from '../../src/domain.ts';
import { follow, inFile, scriptProject } from '../helpers/administration.ts';
import { COMPILE_CACHE, MAIN, type Place, place } from '../helpers/cli.ts';
import { childrenOf } from '../helpers/commands.ts';
import { ifMayUnshare, OWN_PROCESSES } from '../helpers/namespaces.ts';
import { appendTo, endOf, newDeployment, PROJECT } from '../helpers/store.ts';
import { needsTerminal, onTerminal, shownBy } from '../helpers/terminal.ts';

/** After the longest wait of a follower between two looks at the log. */
const LOOK_IS_DUE_MS = 250;

const logsOf = (id: string, ...options: string[]) => ['admin', 'deployment', 'logs', id, ...options];

t.test('a pipe gets the exact bytes of a log', async (t) => {
  const there = place(t);
  const bytes = Buffer.from([0xff, 0x1b, 0x5b, 0x32, 0x4a, 0x00, 0x0d, 0x0a, 0xc3]);
  const id = await withLog(there, bytes);
  for (const options of [[], ['--follow']]) {
    const { stdout, status } = davitSync(there, logsOf(id, ...options));
    t.equal(status, 0);
    t.strictSame(stdout, bytes);
  }
});

t.test('an empty log is reported as nothing printed, or nothing yet', async (t) => {
  const there = place(t);
  const ended = await withLog(there, Buffer.alloc(0));
  await scriptProject(there, 'another', 'true');
  const { id } = await there.json<Deployment>(['admin', 'deployment', 'create', 'another', 'main']);
  t.match(await there.davit(logsOf(ended)), { stdout: '', stderr: 'nothing was printed\n' });
  t.match(await there.davit(logsOf(id)), { stdout: '', stderr: 'nothing was printed yet\n' });
});

t.test('on a terminal, a log keeps only its colours', needsTerminal, async (t) => {
  const there = place(t);
  const id = await withLog(
    there,
    Buffer.from('\u001b[32mgrün\u001b[0m\t\u001b[2J\u001b]0;title\u0007\u009b1m\nend'),
  );
  const { shown, exitCode } = onTerminal(there, logsOf(id));
  t.equal(exitCode, 0);
  t.equal(shown, '\u001b[32mgrün\u001b[0m\t\\x1b[2J\\x1b]0;title\\x07\\x9b1m\nend\u001b[0m\n');
  const followed = onTerminal(there, logsOf(id, '--follow')).shown;
  t.equal(followed, `${shown}deployment ${id} of main: succeeded\n`);
  const plain = onTerminal(there, logsOf(id), { env: { NO_COLOR: '1' } });
  t.equal(plain.shown, 'grün\t\\x1b[2J\\x1b]0;title\\x07\\x9b1m\nend\n');
});

t.test('logs -f prints each byte once and ends when its stdout is closed', async (t) => {
  const there = place(t);
  const id = await runningWithLog(there, Buffer.from('one\n'));
  const follower = follow(there, id);
  await follower.noted("note: no service is running: 'davit serve' ends what is left of it");
  await follower.said('one\n');
  await inFile(there, ({ writer }) => writer.write('logs.append', append(id, Buffer.from('two\n'), 4)));
  await follower.said('one\ntwo\n');
  follower.child.stdout?.destroy();
  await inFile(there, ({ writer }) => writer.write('logs.append', append(id, Buffer.from('three\n'), 8)));
  t.equal(await follower.exitCode, 0);
});

t.test('^C ends a follower, and the shell that waits for it', needsTerminal, async (t) => {
  const there = place(t);
  const id = await runningWithLog(there, Buffer.from('begun\n'));
  const line = [process.execPath, MAIN, ...logsOf(id, '-f')].map((word) => `'${word}'`).join(' ');
  const shown = await shownBy(t, there.directory, 'bash --norc --noprofile -i', '/usr/bin:/bin', [
    [`bash -c "${line}; echo went' 'on"\n`, /begun/],
    ['\u0003', /\^C[\s\S]*[#$] $/],
  ]);
  t.notMatch(shown, /went on/);
});

t.test('a signal that a follower gets at the moment of its next look at the log ends it, too', async (t) => {
  const there = place(t);
  const id = await runningWithLog(there, Buffer.from('one\n'));
  const follower = follow(there, id);
  t.teardown(() => follower.child.kill('SIGKILL'));
  const ended = once(follower.child, 'exit');
  await follower.said('one\n');
  while (!listensToHangup(follower.child.pid)) await delay(1);
  follower.child.kill('SIGSTOP');
  await inFile(there, ({ writer }) => writer.write('logs.append', append(id, Buffer.from('two\n'), 4)));
  await delay(LOOK_IS_DUE_MS);
  follower.child.kill('SIGHUP');
  follower.child.kill('SIGCONT');
  t.strictSame(await ended, [null, 'SIGHUP']);
});

t.test(
  'a follower that is the first process of a container ends at a signal, too',
  ifMayUnshare,
  async (t) => {
    const there = place(t);
    const id = await runningWithLog(there, Buffer.from('one\n'));
    const words = [...OWN_PROCESSES, process.execPath, MAIN, ...logsOf(id, '-f')];
    const container = spawn('unshare', words, {
      cwd: there.directory,
      env: { ...process.env, ...COMPILE_CACHE },
      stdio: ['ignore', 'pipe', 'ignore'],
    });
    const ended = once(container, 'exit');
    await once(container.stdout, 'data');
    // The system drops a signal to such a process until that listens to it.
    const again = setInterval(() => {
      try {
        for (const processId of childrenOf(container.pid)) process.kill(processId, 'SIGTERM');
      } catch {
        // it has just ended
      }
    }, 20);
    t.strictSame(await ended, [143, null]);
    clearInterval(again);
  },
);

t.test('bytes dropped before a follower reached them are marked by a line of their own', async (t) => {
  const there = place(t);
  const id = await runningWithLog(there, Buffer.from('one'));
  const follower = follow(there, id);
  await follower.said('one');
  const appendAfterGap = (text: string, start: number) =>
    inFile(there, ({ writer }) =>
      writer.write('logs.append', {
        ...append(id, Buffer.from(text), start),
        dropTailBefore: start,
        headBytes: 0,
      }),
    );
  await appendAfterGap('three\n', 9);
  await follower.said('one\n[davit: 6 bytes left out]\nthree\n');
  await appendAfterGap('five', 20);
  await follower.said('one\n[davit: 6 bytes left out]\nthree\n[davit: 5 bytes left out]\nfive');
  follower.child.kill();
  await follower.exitCode;
});

t.test('another system is said to carry out what davit does not run, unless it has ended', async (t) => {
  const there = place(t);
  const id = await withLog(there, Buffer.alloc(0));
  await inFile(there, async (store) => {
    const ended = resolveDeployment(store, id);
    t.equal(whyItMayTake({ ...ended, status: 'running' }, store, true), undefined);
    const { id: elsewhere } = await store.writer.write('projects.create', {
      ...PROJECT,
      name: 'other',
      command: null,
    });
    const reported = await store.writer.write('deployments.create', newDeployment(elsewhere));
    const running = { ...resolveDeployment(store, reported.id), status: 'running' as const };
    t.match(whyItMayTake(running, store, true), /another system/);
  });
});

/** Whether a process listens to SIGHUP, the last bit of proc_pid_status(5). Node itself listens to some others. */
function listensToHangup(processId = 0): boolean {
  const caught = /^SigCgt:\s*[\da-f]+([\da-f])$/m.exec(readFileSync(`/proc/${processId}/status`, 'utf8'));
  return (Number.parseInt(caught?.[1] ?? '', 16) & 1) !== 0;
}

/** A deployment that succeeded, with this log. */
async function withLog(there: Place, bytes: Buffer): Promise<DeploymentId> {
  const id = await runningWithLog(there, bytes);
  await inFile(there, ({ writer }) => writer.write('deployments.finish', endOf(id)));
  return id;
}

async function runningWithLog(there: Place, bytes: Buffer): Promise<DeploymentId> {
  const website = await scriptProject(there, 'website', 'true');
  return await inFile(there, async ({ writer }) => {
    const { id } = await writer.write('deployments.create', newDeployment(website));
    await writer.write('deployments.claim', undefined);
    if (bytes.length > 0) await writer.write('logs.append', append(id, bytes, 0));
    return id;
  });
}

function append(id: DeploymentId, bytes: Buffer, start: number) {
  return appendTo(id, [{ start, bytes }], { headBytes: 1024 });
}

function davitSync({ directory }: Place, words: string[]) {
  return spawnSync(process.execPath, [MAIN, ...words], { cwd: directory, env: COMPILE_CACHE });
}
