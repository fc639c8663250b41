import { type SpawnSyncReturns, spawnSync } from 'node:child_process';
import { chmodSync, chownSync, mkdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir, userInfo } from 'node:os';
import { join } from 'node:path';
import t from 'tap';
import { realEffects } from '../../src/effects.ts';
import { lockForServing } from '../../src/store/lock.ts';
import { MAIN, type Place, place } from '../helpers/cli.ts';
import { ifMayMountFuse, onDeadMount } from '../helpers/dead-mount.ts';
import { changeFile } from '../helpers/files.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';

interface Checked {
  project_id: string;
  project_name: string;
  checked_as: string;
  ok: boolean;
  findings: { check: string; level: string; message: string; advice: string | null }[];
}

t.test('the check of a sound project passes and shows no secrets', async (t) => {
  const there = place(t);
  script(there, 'deploy.sh', '#!/bin/sh\ntouch ran\n');
  await create(there, '--dir', '.', '--env', 'TOKEN=hidden', '--', './deploy.sh', 'argument');
  const before = there.dump();
  const { stdout, stderr, exitCode } = await there.davit(['admin', 'project', 'check', 'website']);
  t.strictSame([stderr, exitCode], ['', 0]);
  t.match(stdout, /^project website \(prj_\w+\)\nCHECK +RESULT +FINDING\n/);
  for (const line of [
    new RegExp(`^user +ok +checked as ${userName()}$`, 'm'),
    new RegExp(`^directory +ok +${there.directory}$`, 'm'),
    new RegExp(`^command +ok +${there.directory}/deploy\\.sh$`, 'm'),
    /^variables +ok +TOKEN$/m,
    /^limits +ok +timeout 30m, idle timeout off$/m,
  ]) {
    t.match(stdout, line);
  }
  t.notMatch(stdout, /hidden|what to do/);
  t.strictSame(there.dump(), before, 'nothing is changed');
  t.match(await check(there), { ok: true, project_name: 'website', checked_as: userName() });
});

t.test('each cause that makes a deployment fail is found, with advice', async (t) => {
  const cases: [claim: string, prepare: (there: Place) => string[], message: RegExp, advice: RegExp][] = [
    [
      'no directory',
      () => ['--dir', 'missing', '--', './deploy.sh'],
      /^the directory .+\/missing does not exist$/,
      /^create it, or choose another one: davit admin project set prj_\w+ --dir/,
    ],
    [
      'a file for a directory',
      (there) => ['--dir', script(there, 'file', ''), '--', 'true'],
      /\/file is not a directory$/,
      /--dir/,
    ],
    [
      'no command',
      () => ['--dir', '.', '--', './none.sh'],
      /^the command .+\/none\.sh does not exist$/,
      /put it there/,
    ],
    [
      'a command that is nowhere in PATH',
      () => ['--', 'no-such-command'],
      /^the command no-such-command was not found in PATH \(\/usr\/local\/sbin:.*\/bin\)$/,
      /--env PATH=/,
    ],
    [
      'a command that is not in the PATH of the project',
      () => ['--env', 'PATH=/nowhere', '--', 'true'],
      /^the command true was not found in PATH \(the project's own\)$/,
      /--env PATH=/,
    ],
    [
      'links in a circle for a directory',
      ({ directory }) => {
        symlinkSync('circle', join(directory, 'circle'));
        return ['--dir', 'circle', '--', './deploy.sh'];
      },
      /^.+\/circle cannot be reached: its symbolic links form a loop$/,
      /^fix the link, or choose another path with davit admin project set prj_\w+$/,
    ],
    [
      'a directory with too long a name',
      () => ['--dir', 'x'.repeat(256), '--', 'true'],
      /^.+\/x+ cannot be reached: the name is too long$/,
      /^choose another path with davit admin project set prj_\w+$/,
    ],
    [
      'links in a circle for a command',
      ({ directory }) => {
        symlinkSync('circle', join(directory, 'circle'));
        return ['--dir', '.', '--', './circle'];
      },
      /^.+\/circle cannot be reached: its symbolic links form a loop$/,
      /^fix the link/,
    ],
    [
      'a directory for a command',
      () => ['--', '/usr'],
      /^the command \/usr is a directory$/,
      /choose another/,
    ],
    [
      'no right to run it',
      (there) => {
        script(there, 'deploy it.sh', '#!/bin/sh\n', 0o600);
        return ['--dir', '.', '--', './deploy it.sh'];
      },
      /\/deploy it\.sh is not executable$/,
      /^chmod u\+rx \S+\/deploy\\ it\.sh$/,
    ],
    [
      'no interpreter',
      (there) => ['--', script(there, 'deploy.sh', '#!/no/such/shell -e\n')],
      /\/deploy\.sh begins with #!\/no\/such\/shell, which does not exist/,
      /^install it, or change the first line$/,
    ],
    [
      'line ends of another system',
      (there) => ['--', script(there, 'deploy.sh', '#!/bin/sh\r\necho\r\n')],
      /begins with #!\/bin\/sh\\x0d, which does not exist/,
      /CR LF.*sed -i 's\/\\r\$\/\/' .+deploy\.sh'?$/,
    ],
    [
      'line ends of another system, behind env(1)',
      (there) => ['--', script(there, 'deploy.sh', '#!/usr/bin/env sh\r\necho\r\n')],
      /is run by sh\r, as its first line says/,
      /CR LF.*sed -i 's\/\\r\$\/\/' .+deploy\.sh'?$/,
    ],
    [
      'line ends of another system, behind an option of a shell',
      (there) => ['--', script(there, 'deploy.sh', '#!/bin/sh -e\r\necho\r\n')],
      /\/deploy\.sh begins with #!\/bin\/sh -e and a CR, which the shell takes for one more option$/,
      /CR LF.*sed -i 's\/\\r\$\/\/' .+deploy\.sh'?$/,
    ],
    [
      'a byte order mark before #!',
      (there) => ['--', script(there, 'deploy.sh', '\ufeff#!/bin/sh\n')],
      /neither a program for this machine nor a script that begins with #!$/,
      /^remove the byte order mark, .*: sed -i '1s\/\^\\xef\\xbb\\xbf\/\/' .+deploy\.sh'?$/,
    ],
    [
      'words that env(1) takes for one',
      (there) => ['--', script(there, 'deploy', '#!/usr/bin/env sh -e\n')],
      /\/deploy is run by sh -e, as its first line says: the command sh -e was not found in PATH/,
      /env -S/,
    ],
    [
      'a program that env(1) does not find',
      (there) => ['--', script(there, 'deploy', '#!/usr/bin/env -S no-such-node --flag\n')],
      /\/deploy is run by no-such-node, as its first line says: the command no-such-node was not found in PATH/,
      /--env PATH=/,
    ],
    [
      'a command that anybody may change',
      (there) => ['--', script(there, 'deploy.sh', '#!/bin/sh\n', 0o1777)],
      /^anybody on this machine can change .+\/deploy\.sh$/,
      /^chmod o-w .+\/deploy\.sh'?$/,
    ],
    [
      'a directory that anybody may change',
      (there) => {
        mkdirSync(join(there.directory, 'open'));
        chmodSync(join(there.directory, 'open'), 0o777);
        return ['--dir', 'open', '--', 'true'];
      },
      /^anybody on this machine can change .+\/open$/,
      /^chmod o-w/,
    ],
    [
      'a limit without effect',
      () => ['--timeout', '5m', '--idle-timeout', '5m', '--', 'true'],
      /^the idle timeout \(5m\) has no effect, as the timeout \(5m\) is not longer$/,
      /--idle-timeout/,
    ],
  ];
  await Promise.all(
    cases.map(async ([claim, prepare, message, advice]) => {
      const there = place(t);
      await create(there, ...prepare(there));
      const { ok, findings } = await check(there, 1);
      t.equal(ok, false, claim);
      const problems = findings.filter(({ level }) => level === 'problem');
      t.equal(problems.length, 1, claim);
      t.match(problems, [{ message, advice }], claim);
    }),
  );
});

t.test('a directory that cannot be reached is not advised to be created', ifMayMountFuse, async (t) => {
  const there = place(t);
  const dead = join(there.directory, 'dead');
  mkdirSync(dead);
  await create(there, '--dir', dead, '--', './deploy.sh');
  const words = ['admin', 'project', 'check', 'website', '--json', '--db', there.dbPath];
  const { findings, ok } = printedBy(onDeadMount(dead, [process.execPath, MAIN, ...words]));
  t.equal(ok, false);
  t.match(
    findings.find(({ check }) => check === 'directory'),
    {
      level: 'problem',
      message: `${dead} cannot be reached: ENOTCONN`,
      advice: /^see whether its file system is there/,
    },
  );
});

t.test('problems of the directory and of the command are both reported', async (t) => {
  for (const [command, count] of [
    ['/no/such/command', 2],
    ['no-such-command', 2],
    ['bin/counts-from-the-directory', 1],
  ] as const) {
    const there = place(t);
    await create(there, '--dir', 'missing', '--', command);
    const { findings } = await check(there, 1);
    t.equal(findings.filter(({ level }) => level === 'problem').length, count, command);
  }
});

t.test('a stored variable that is no longer allowed is a problem', async (t) => {
  const there = place(t);
  await create(there, '--env', 'TOKEN=x', '--', 'true');
  changeFile(there.dbPath, "INSERT INTO project_variables SELECT id, 'LD_PRELOAD', 'hidden' FROM projects");
  const { findings } = await check(there, 1);
  t.match(
    findings.filter(({ check }) => check === 'variables'),
    [
      {
        level: 'problem',
        message: /^LD_PRELOAD changes how programs are loaded/,
        advice: /^davit admin project set prj_\w+ --unset-env LD_PRELOAD$/,
      },
    ],
  );
  t.notMatch(JSON.stringify(findings), /hidden/);
});

t.test('sound interpreters, permissions and limits are no problem', async (t) => {
  const cases: ((there: Place) => string[])[] = [
    ...[
      '#!/usr/bin/env',
      '#!/usr/bin/env -S LC_ALL=C sh -e',
      '#!/usr/bin/env -S -u FOO sh',
      '#!/usr/bin/env -S "sh" -e',
      '#!/usr/bin/env -S PATH=/usr/local/own:/bin own-program',
      '#!/bin/sh no-such-program',
      '#!/bin/cat -u\r', // only a shell is known to refuse it
    ].map((line) => (there: Place) => ['--', script(there, 'deploy.sh', `${line}\n`)]),
    (there) => {
      symlinkSync('/bin/sh', join(there.directory, 'zsh')); // the real one ignores a CR behind its options
      return ['--', script(there, 'deploy.sh', `#!${there.directory}/zsh -e\r\n`)];
    },
    (there) => ['--', script(there, 'deploy.sh', '#!/bin/sh\n', 0o775)],
    ({ directory }) => {
      mkdirSync(join(directory, 'shared'));
      chmodSync(join(directory, 'shared'), 0o1777);
      return ['--dir', 'shared', '--', 'true'];
    },
    () => ['--timeout', 'off', '--idle-timeout', '5m', '--', 'true'],
    () => ['--timeout', '5s', '--', 'true'],
  ];
  await Promise.all(
    cases.map(async (prepare) => {
      const there = place(t);
      const options = prepare(there);
      await create(there, ...options);
      const { findings } = await check(there);
      t.ok(
        findings.every(({ level }) => level === 'ok'),
        options.join(' '),
      );
    }),
  );
});

t.test('a link to a command counts as its target', async (t) => {
  const there = place(t);
  symlinkSync(script(there, 'real.sh', '#!/bin/sh\n'), join(there.directory, 'deploy.sh'));
  await create(there, '--dir', '.', '--', './deploy.sh');
  t.match(await check(there), { ok: true });
});

t.test('an unusual but possible setting is a note, and the check passes', async (t) => {
  const cases: [options: string[], check: string, message: RegExp][] = [
    [['--timeout', 'off', '--', 'true'], 'limits', /^none: a command that hangs blocks all/],
    [['--timeout', '2s', '--', 'true'], 'limits', /^timeout 2s, idle timeout off: very short$/],
    [['--idle-timeout', '2s', '--', 'true'], 'limits', /^timeout 30m, idle timeout 2s: very short$/],
    [
      ['--timeout', 'off', '--idle-timeout', '2s', '--', 'true'],
      'limits',
      /^timeout off, idle timeout 2s: very short$/,
    ],
    [
      ['--env', 'HOME=/nonexistent', '--', 'true'],
      'directory',
      /^HOME is the project's own, where this user cannot work$/,
    ],
    [[], 'limits', /^none: a deployment whose end is never reported stays open for ever$/],
  ];
  await Promise.all(
    cases.map(async ([options, name, message]) => {
      const there = place(t);
      await create(there, ...options);
      const { ok, findings } = await check(there);
      t.ok(ok);
      const notes = findings.filter(({ level }) => level === 'note');
      t.match(notes, [{ check: name, message, advice: /davit admin project set prj_\w+/ }]);
      t.equal(notes.length, 1);
    }),
  );
});

t.test('a project without a command has no files to check', async (t) => {
  const there = place(t);
  await create(there, '--report-timeout', '2h');
  const { findings } = await check(there);
  t.match(findings, [
    { check: 'user', level: 'ok' },
    { check: 'status', level: 'ok' },
    { check: 'command', level: 'ok', message: 'none: another system does the work and reports it' },
    { check: 'variables', level: 'ok', message: 'none' },
    { check: 'limits', level: 'ok', message: 'report timeout 2h' },
  ]);
});

t.test(
  "a command that is another user's and closed to this one is a finding, whose advice does not open it to all",
  ifMayBeNobody(process.execPath, MAIN, `${tmpdir()}/.`),
  async (t) => {
    const there = place(t);
    const path = script(there, 'deploy.sh', '#!/bin/sh\n');
    await create(there, '--', path);
    for (const one of [there.directory, there.dbPath]) chownSync(one, 65_534, 65_534);
    const somebody = ['--reuid=65534', '--regid=65534', '--clear-groups', process.execPath, MAIN];
    const words = ['admin', 'project', 'check', 'website', '--json', '--db', there.dbPath];
    const cases: [mode: number, level: string, message: RegExp][] = [
      [0o600, 'problem', /is not executable$/],
      [0o700, 'problem', /may not execute/],
      // A script would fail.
      [0o711, 'note', /may be executed, but not read by this user/],
    ];
    for (const [mode, level, message] of cases) {
      chmodSync(path, mode);
      const { findings } = printedBy(
        spawnSync('setpriv', [...somebody, ...words], { env: {}, encoding: 'utf8' }),
      );
      t.match(
        findings.filter(({ check }) => check === 'command'),
        [
          {
            level,
            message,
            advice: /let this user read and execute \S+\/deploy\.sh: chgrp and chmod g\+rx, or/,
          },
        ],
      );
    }
  },
);

t.test('a paused or archived project is noted', async (t) => {
  const there = place(t);
  await create(there, '--', 'true');
  for (const [word, message] of [
    ['pause', /^paused/],
    ['archive', /^archived/],
  ] as const) {
    await there.davit(['admin', 'project', word, 'website']);
    t.match((await check(there)).findings[1], { check: 'status', level: 'note', message });
  }
});

t.test('a user who does not own the database is told to ask its owner', ifMayBeNobody(), async (t) => {
  const there = place(t);
  await create(there, '--', 'true');
  chownSync(there.dbPath, 65_533, 65_533);
  t.match((await check(there)).findings[0], {
    check: 'user',
    level: 'note',
    message: /^checked as root, and the file belongs to '#65533', who may have other rights$/,
    advice: /^sudo -u '#65533' davit admin project check prj_\w+ --db \/\S+\/davit\.db$/,
  });
});

t.test('a service in a container has the id of another process here', ifMayBeNobody(), async (t) => {
  const there = place(t);
  await create(there, '--', 'true');
  chownSync(there.dbPath, 65_533, 65_533);
  t.teardown(lockForServing(there.dbPath, 1, realEffects));
  t.match((await check(there)).findings[0], { check: 'user', message: /the file belongs to '#65533'/ });
});

t.test('an unknown or missing project is refused', async (t) => {
  const there = place(t);
  await create(there, '--', 'true');
  t.match(await there.refused(['admin', 'project', 'check', 'webiste']), {
    exitCode: 1,
    message: /there is no project 'webiste': did you mean 'website'\?/,
  });
  t.match(await there.refused(['admin', 'project', 'check']), {
    exitCode: 2,
    message: /missing required argument/,
  });
});

/** The path of a file with this text in the directory of the test. */
function script({ directory }: Place, name: string, text: string, mode = 0o755): string {
  const path = join(directory, name);
  writeFileSync(path, text);
  chmodSync(path, mode);
  return path;
}

async function create({ davit }: Place, ...options: string[]): Promise<void> {
  const { exitCode, stderr } = await davit(['admin', 'project', 'create', '--name', 'website', ...options]);
  if (exitCode !== 0) throw new Error(stderr);
}

async function check({ davit }: Place, expectedExitCode = 0): Promise<Checked> {
  const { stdout, stderr, exitCode } = await davit(['admin', 'project', 'check', 'website', '--json']);
  if (exitCode !== expectedExitCode) throw new Error(`exit code ${exitCode}: ${stdout}${stderr}`);
  return JSON.parse(stdout);
}

/** Throws what is known of a process that ended otherwise than by a report, as one does that somebody kills. */
function printedBy({ stdout, stderr, status, signal }: SpawnSyncReturns<string>): Checked {
  if (stdout === '') throw new Error(`no report, ended by ${signal ?? status}: ${stderr}`);
  const checked: Checked = JSON.parse(stdout);
  if (status !== (checked.ok ? 0 : 1)) throw new Error(`exit code ${status}: ${stdout}${stderr}`);
  return checked;
}

/** In a container a user may be a number only. */
function userName(): string {
  try {
    return userInfo().username;
  } catch {
    return `user ${process.getuid?.()}`;
  }
}
