import { spawnSync } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  closeSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import t from 'tap';
import { commandProblem, directoryProblem, whyNotStarted } from '../../src/deploy/command-file.ts';
import { commandPath, findCommand, type SpawnRequest } from '../../src/deploy/command-path.ts';
import { posix } from '../helpers/commands.ts';
import { ifMayMountFuse, onDeadMount, onHangingMount } from '../helpers/dead-mount.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { ifHas } from '../helpers/programs.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/** A machine may have been taught to run more. */
const OTHER_FORMATS = '/proc/sys/fs/binfmt_misc';
const ifNoOtherFormats =
  existsSync(OTHER_FORMATS) && readdirSync(OTHER_FORMATS).length > 2
    ? { skip: 'binfmt_misc is used here' }
    : {};

/** As in a directory that a chroot was made of by hand. */
const WITHOUT_DEVICES = [
  ...['--map-root-user', '--mount', 'sh', '-c'],
  ...['mount -t tmpfs none /dev && exec "$@"', 'sh'],
];
const ifMayHideDevices =
  spawnSync('unshare', [...WITHOUT_DEVICES, 'true']).status === 0
    ? {}
    : { skip: 'mounting is not allowed here' };

const MODULE = join(import.meta.dirname, '../../src/deploy/command-file.ts');
const COMMAND_FILE = pathToFileURL(MODULE).href;

t.test('a system error is put into words that name nothing secret', async (t) => {
  const request = requestOf(['true', '--token=secret'], {
    environment: { PATH: '/usr/bin:/bin', SECRET: 's' },
  });
  for (const [code, cause] of [
    ['E2BIG', 'the arguments and the environment of the command are larger than the system allows'],
    ['EAGAIN', 'the system allows no more processes'],
    ['EMFILE', 'the system allows no more open files'],
    ['ENFILE', 'the system allows no more open files'],
    ['ENOMEM', 'there is not enough memory to start the command'],
    ['ENOEXEC', 'the command true is neither a program for this machine nor a script that begins with #!'],
    ['ETXTBSY', 'the command true is open for writing: deploy again once whoever writes it is done'],
    ['EPERM', 'the command true could not be started: EPERM'],
    [
      'hidden in /proc',
      'the command true became another user, whose processes /proc hides from davit (hidepid), and was ended if davit may: let the group of davit see them (gid= of /proc)',
    ],
  ] as const) {
    t.equal(whyNotStarted(code, request), cause);
  }
});

t.test('no file is looked at for an error that files do not explain', async (t) => {
  const request = requestOf(['./tool'], { directory: '/no/such/directory' });
  for (const code of ['EIO', 'ENOTCONN', 'ETIMEDOUT', 'EHOSTDOWN', 'Unknown system error -116'])
    t.equal(whyNotStarted(code, request), `the command ./tool could not be started: ${code}`);
  for (const code of ['ENOENT', 'ENOTDIR', 'EACCES', 'EPERM', 'ELOOP', 'ENAMETOOLONG'])
    t.equal(whyNotStarted(code, request), 'the directory /no/such/directory does not exist');
});

t.test('a name means the first executable in PATH, else the first file there', async (t) => {
  const directory = temporaryDirectory(t);
  for (const folder of ['directory', 'closed', 'shut', 'first', 'second']) mkdirSync(join(directory, folder));
  mkdirSync(join(directory, 'directory/tool'));
  for (const folder of ['closed', 'shut'])
    writeFileSync(join(directory, folder, 'tool'), '#!/bin/sh\n', { mode: 0o644 });
  for (const folder of ['first', 'second'])
    writeFileSync(join(directory, folder, 'tool'), '#!/bin/sh\n', { mode: 0o755 });
  const found = async (path: string) => {
    const request = requestOf(['tool'], { directory, environment: { PATH: path } });
    t.equal(await findCommand(request), commandPath(request));
    t.type(findCommand(request), Promise);
    return [commandPath(request)?.slice(directory.length), commandProblem(request)?.kind];
  };
  t.strictSame(await found('none:directory:closed:first:second'), ['/first/tool', undefined]);
  t.strictSame(await found('directory:closed:shut'), ['/closed/tool', 'notExecutable']);
  t.strictSame(await found('none:directory'), [undefined, 'notFound']);
  t.equal(await findCommand(requestOf(['first/tool'], { directory })), join(directory, 'first/tool'));
  const second = join(directory, 'second');
  const here = requestOf(['tool'], { directory: second, environment: { PATH: `none::${directory}/first` } });
  for (const path of [await findCommand(here), commandPath(here)])
    t.equal(path, join(second, 'tool'), 'an empty place is the directory of the command');
  t.strictSame(
    commandProblem(requestOf(['tool'], { directory, environment: {} })),
    { kind: 'notFound', word: 'tool', searchPath: '' },
    'and not in the PATH of davit',
  );
});

t.test('a path leads above where a link leads, as in a shell', async (t) => {
  const directory = temporaryDirectory(t);
  mkdirSync(join(directory, 'releases/42'), { recursive: true });
  symlinkSync('releases/42', join(directory, 'current'));
  const current = join(directory, 'current');
  const path = join(directory, 'releases/deploy.sh');
  for (const word of ['../deploy.sh', './../deploy.sh', `${current}/../deploy.sh`]) {
    const request = requestOf([word], { directory: current });
    writeFileSync(path, '#!../sh\n', { mode: 0o755 });
    t.match(commandProblem(request), { kind: 'noInterpreter', interpreter: '../sh' }, word);
    copyFileSync('/bin/sh', join(directory, 'releases/sh'));
    t.equal(commandProblem(request), undefined, word);
    t.equal(realpathSync.native(commandPath(request) ?? ''), path);
    rmSync(join(directory, 'releases/sh'));
  }
  const inPath = requestOf(['deploy.sh'], { directory: current, environment: { PATH: 'none:..:' } });
  t.equal(realpathSync.native(commandPath(inPath) ?? ''), path);
});

t.test('a socket is neither a command nor a directory', async (t) => {
  const path = join(temporaryDirectory(t), 'socket');
  const server = createServer().listen(path);
  t.teardown(() => server.close());
  await once(server, 'listening');
  chmodSync(path, 0o755);
  t.strictSame(commandProblem(requestOf([path])), { kind: 'notExecutable', path });
  t.strictSame(directoryProblem(path), { kind: 'notADirectory', path });
});

/** Runs this code as a user who is not root, and gives what it printed. */
function lookAsSomebody(look: string): string {
  const words = [process.execPath, '--input-type=module', '--eval', look];
  const somebody = ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups', ...words];
  const [program = '', ...rest] = process.getuid?.() === 0 ? somebody : words;
  return spawnSync(program, rest, { encoding: 'utf8', env: {} }).stdout;
}

/** Nothing is closed to root, who looks as nobody. */
const ifMayLook =
  process.getuid?.() === 0 ? { ...ifHas('setpriv'), ...ifMayBeNobody(MODULE, process.execPath) } : {};

t.test('a path that the user may not reach is told apart from a missing one', ifMayLook, async (t) => {
  const directory = temporaryDirectory(t);
  mkdirSync(join(directory, 'closed/inner'), { recursive: true });
  writeFileSync(join(directory, 'closed/inner/tool'), '#!/bin/sh\n', { mode: 0o755 });
  chmodSync(join(directory, 'closed'), 0o600);
  t.teardown(() => chmodSync(join(directory, 'closed'), 0o700));
  chmodSync(directory, 0o755);
  const look = `
    const { commandProblem, directoryProblem } = await import(${JSON.stringify(COMMAND_FILE)});
    const closed = ${JSON.stringify(join(directory, 'closed'))};
    const request = { command: [closed + '/inner/tool'], directory: '/', environment: {} };
    console.log(JSON.stringify([
      directoryProblem(closed), directoryProblem(closed + '/inner'), commandProblem(request),
    ]));`;
  t.strictSame(JSON.parse(lookAsSomebody(look)), [
    { kind: 'directoryClosed', path: join(directory, 'closed') },
    { kind: 'directoryClosed', path: join(directory, 'closed/inner') },
    { kind: 'commandHidden', path: join(directory, 'closed/inner/tool') },
  ]);
});

t.test(
  'a command that others may execute, but not this user, is told with its rights',
  ifMayLook,
  async (t) => {
    const directory = temporaryDirectory(t);
    chmodSync(directory, 0o755);
    const path = join(directory, 'tool');
    writeFileSync(path, '#!/bin/sh\n');
    // Whoever is not root looks as its owner.
    const [mode, owner] = process.getuid?.() === 0 ? [0o700, 'root'] : [0o077, `user ${process.getuid?.()}`];
    chmodSync(path, mode);
    const look = `
    const { whyNotStarted } = await import(${JSON.stringify(COMMAND_FILE)});
    const request = { command: [${JSON.stringify(path)}], directory: '/', environment: {} };
    console.log(whyNotStarted('EACCES', request));`;
    const rights = `0${mode.toString(8).padStart(3, '0')}, ${owner}`;
    t.equal(lookAsSomebody(look), `this user may not execute the command ${path} (${rights})\n`);
  },
);

t.test('what is mounted noexec is told apart from what may not be executed', ifMayHideDevices, async (t) => {
  const directory = temporaryDirectory(t);
  const path = join(directory, 'not here/tool');
  mkdirSync(join(directory, 'not here'));
  const look = `
    const { commandProblem } = await import(${JSON.stringify(COMMAND_FILE)});
    const { chmodSync, writeFileSync } = await import('node:fs');
    const path = ${JSON.stringify(path)};
    const problem = () => commandProblem({ command: [path], directory: '/', environment: {} });
    writeFileSync(path, '#!/bin/sh\\n');
    const before = problem();
    chmodSync(path, 0o755);
    console.log(JSON.stringify([before, problem()]));`;
  const words = [process.execPath, '--input-type=module', '--eval', look];
  const mount = `mount -t tmpfs -o noexec none '${directory}/not here' && exec "$@"`;
  const unshare = ['--map-root-user', '--mount', 'sh', '-c', mount, 'sh', ...words];
  const { stdout } = spawnSync('unshare', unshare, {
    encoding: 'utf8',
    env: { PATH: '/usr/bin:/bin:/usr/sbin:/sbin' },
  });
  t.strictSame(JSON.parse(stdout), [
    { kind: 'notExecutable', path },
    { kind: 'onNoexec', path },
  ]);
});

t.test('a file system that cannot be reached is not taken for missing files', ifMayMountFuse, async (t) => {
  const directory = temporaryDirectory(t);
  const [dead, script, loop] = [join(directory, 'dead'), join(directory, 'script'), join(directory, 'loop')];
  mkdirSync(dead);
  writeFileSync(script, `#!${dead}/sh\n`, { mode: 0o755 });
  symlinkSync('loop', loop);
  const look = `
    const { commandProblem, directoryProblem, whyNotStarted } = await import(${JSON.stringify(COMMAND_FILE)});
    const [dead, script, loop] = ${JSON.stringify([dead, script, loop])};
    const requestOf = (word, directory = '/') => ({ command: [word], directory, environment: { PATH: dead } });
    console.log(JSON.stringify([
      directoryProblem(dead),
      ...[dead + '/tool', script, 'tool', loop].map((word) => commandProblem(requestOf(word))),
      whyNotStarted('EACCES', requestOf('/bin/true', dead)),
    ]));`;
  const { stdout } = onDeadMount(dead, [process.execPath, '--input-type=module', '--eval', look]);
  const unreachable = { kind: 'unreachable', code: 'ENOTCONN' };
  t.strictSame(JSON.parse(stdout), [
    { ...unreachable, path: dead },
    { ...unreachable, path: `${dead}/tool` },
    { ...unreachable, path: `${dead}/sh` },
    { kind: 'notFound', word: 'tool', searchPath: dead },
    { kind: 'linkLoop', path: loop },
    `${dead} cannot be reached: ENOTCONN`,
  ]);
});

t.test('why a command is not started is said without a look at what hangs', ifMayMountFuse, async (t) => {
  const directory = temporaryDirectory(t);
  const hanging = join(directory, 'hanging');
  mkdirSync(hanging);
  writeFileSync(join(directory, 'script'), '#!/no/such/sh\n', { mode: 0o755 });
  const look = `
    const { whyNotFound, whyNotStarted } = await import(${JSON.stringify(COMMAND_FILE)});
    const [directory, hanging] = ${JSON.stringify([directory, hanging])};
    console.log(whyNotFound({ command: ['tool'], directory: hanging, environment: { PATH: directory } }));
    const environment = { PATH: directory + ':' + hanging };
    console.log(whyNotStarted('ENOENT', { command: ['script'], directory, environment }));`;
  const { stdout } = onHangingMount(hanging, [process.execPath, '--input-type=module', '--eval', look]);
  t.equal(
    stdout,
    "the command tool was not found in PATH (the project's own)\n" +
      `the command ${directory}/script begins with #!/no/such/sh, which does not exist or is not executable\n`,
  );
});

/** elf(5): a processor that davit is not built for. */
const RISC_V = 243;

t.test('a file that the kernel would not execute is not a program', ifNoOtherFormats, async (t) => {
  const path = join(temporaryDirectory(t), 'tool');
  // Its own: the program opens it by its name, and stderr may be another user's.
  const output = posix.pipe();
  t.teardown(() => closeSync(output));
  const foreign = readFileSync('/bin/true');
  foreign.writeUInt16LE(RISC_V, 18);
  // Among its program headers, of which the second says where the loader's name is.
  const cutOff = readFileSync('/bin/true').subarray(0, 300);
  for (const content of [
    '',
    'echo no first line\n',
    '\ufeff#!/bin/sh\n',
    '#!\n/bin/sh',
    'MZ',
    '\x7fELF',
    foreign,
    cutOff,
  ]) {
    writeFileSync(path, content, { mode: 0o755 });
    const what = content.slice(0, 20).toString();
    t.strictSame(commandProblem(requestOf([path])), { kind: 'notAProgram', path }, what);
    const program = { path, arguments: [path], environment: {}, directory: '/', output };
    t.strictSame(await posix.spawn(program), { code: 'ENOEXEC' }, 'so the kernel has it');
    t.match(whyNotStarted('ENOEXEC', requestOf([path])), /is neither a program for this machine nor/, what);
  }
  t.equal(commandProblem(requestOf([process.execPath])), undefined);
});

t.test('a program with a missing loader is said to be built for another system', async (t) => {
  const path = join(temporaryDirectory(t), 'tool');
  const program = readFileSync('/bin/true');
  const loaderAt = program.indexOf('/ld-linux');
  t.ok(loaderAt > 0);
  program.write('/ld-nobody', loaderAt);
  writeFileSync(path, program, { mode: 0o755 });
  t.match(spawnSync(path).error, { code: 'ENOENT' });
  t.match(
    whyNotStarted('ENOENT', requestOf([path])),
    /tool needs the dynamic loader \/.*\/ld-nobody\S+, which is missing here: it was built for another system$/,
  );
});

t.test(
  'the interpreter of a script is named if it cannot be executed itself',
  ifNoOtherFormats,
  async (t) => {
    const directory = temporaryDirectory(t);
    writeFileSync(join(directory, 'script'), '#!./interpreter\n', { mode: 0o755 });
    const path = join(directory, 'interpreter');
    const output = posix.pipe();
    t.teardown(() => closeSync(output));
    const foreign = readFileSync('/bin/true');
    foreign.writeUInt16LE(RISC_V, 18);
    const unloadable = readFileSync('/bin/true');
    unloadable.write('/ld-nobody', unloadable.indexOf('/ld-linux'));
    const request = requestOf(['./script'], { directory });
    const program = { path: './script', arguments: ['./script'], environment: {}, directory, output };
    for (const [content, code, problem] of [
      [foreign, 'ENOEXEC', { kind: 'notAProgram', path }],
      [unloadable, 'ENOENT', { kind: 'noLoader', path }],
      ['#!/no/such/sh\n', 'ENOENT', { kind: 'noInterpreter', path, interpreter: '/no/such/sh' }],
    ] as const) {
      writeFileSync(path, content, { mode: 0o755 });
      t.strictSame(await posix.spawn(program), { code }, 'so the kernel has it');
      t.match(commandProblem(request), problem);
      t.ok(whyNotStarted(code, request).startsWith(`the command ${path} `), code);
    }
  },
);

t.test('scripts that are each the interpreter of the other are followed to an end', async (t) => {
  const path = join(temporaryDirectory(t), 'script');
  writeFileSync(path, `#!${path}\n`, { mode: 0o755 });
  t.match(spawnSync(path).error, { code: 'ELOOP' }, 'so the kernel has it');
  t.equal(whyNotStarted('ELOOP', requestOf([path])), `the command ${path} could not be started: ELOOP`);
});

t.test('an interpreter that is a directory is none', async (t) => {
  const path = join(temporaryDirectory(t), 'script');
  writeFileSync(path, '#!/tmp\n', { mode: 0o755 });
  t.match(spawnSync(path).error, { code: 'EACCES' }, 'so the kernel has it');
  t.strictSame(commandProblem(requestOf([path])), { kind: 'noInterpreter', path, interpreter: '/tmp' });
});

t.test('a missing /dev/null is named as the cause, not a loader', ifMayHideDevices, async (t) => {
  const look = `
    const { whyNotStarted } = await import(${JSON.stringify(COMMAND_FILE)});
    console.log(whyNotStarted('ENOENT', { command: ['/bin/sh'], directory: '/', environment: {} }));`;
  const { stdout } = spawnSync(
    'unshare',
    [...WITHOUT_DEVICES, process.execPath, '--input-type=module', '--eval', look],
    { encoding: 'utf8' },
  );
  t.match(
    stdout,
    /^\/dev\/null, which every command has as its stdin, cannot be read .*\(ENOENT\): create it again/,
  );
});

t.test('a relative interpreter counts from the directory of the command', async (t) => {
  const directory = temporaryDirectory(t);
  writeFileSync(join(directory, 'interpreter'), '#!/bin/sh\necho "$1 is run"\n', { mode: 0o755 });
  writeFileSync(join(directory, 'script'), '#!./interpreter\n', { mode: 0o755 });
  const { stdout } = spawnSync('./script', { cwd: directory, encoding: 'utf8' });
  t.equal(stdout, './script is run\n', 'so the kernel has it');
  t.equal(commandProblem(requestOf(['./script'], { directory })), undefined);
  t.match(commandProblem(requestOf([join(directory, 'script')])), { kind: 'noInterpreter' });
});

function requestOf(command: SpawnRequest['command'], changes: Partial<SpawnRequest> = {}): SpawnRequest {
  return { command, directory: '/', environment: { PATH: '/usr/bin:/bin' }, ...changes };
}
