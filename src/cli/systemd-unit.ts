import { dirname, resolve } from 'node:path';
import { type Command, InvalidArgumentError } from 'commander';
import { selfCommand } from '../assets.ts';
import { commandPath } from '../deploy/command-path.ts';
import { AppError } from '../errors.ts';
import { option } from '../options.ts';
import { absolutePath, realPath, statusOf } from '../paths.ts';
import { printable } from '../printable.ts';
import { quoteForBash } from '../shell-words.ts';
import { type CommandContext, explain } from './command.ts';
import { dbPathOf } from './database-file.ts';
import { nameOfUser } from './users.ts';

const USER = 'davit';
const STATE_DIRECTORY = '/var/lib/davit';

/** `davit admin systemd-unit`. */
export function defineSystemdUnit(command: Command, context: CommandContext): void {
  explain(
    command,
    'Prints a unit file that runs this davit as a service. It tells systemd when it is ready, has time to end its commands ' +
      'when it is stopped, and may write to its own directory only. This sandbox also holds for the commands of the ' +
      'projects: add what they write to with ReadWritePaths=.',
    [
      'davit admin systemd-unit | sudo tee /etc/systemd/system/davit.service',
      'davit admin systemd-unit --user www-data --db /srv/davit/davit.db',
    ],
  )
    .addOption(option('--user <name>', 'the user that the service runs as').argParser(userOf).default(USER))
    .action(({ user }: { user: string }) => {
      const isTold = command.getOptionValueSourceWithGlobals('db') !== 'default';
      const dbPath = isTold ? absolutePath(dbPathOf(command)) : `${STATE_DIRECTORY}/davit.db`;
      const { file, arguments: words } = selfCommand();
      // systemd takes no path with `..`, which is left where the directory is missing.
      const realDbPath = resolve(realPath(dbPath));
      const called = calledPath(file, context.environment['PATH']);
      refuseControls([called, ...words, dbPath, realDbPath]);
      context.terminal.print(unitText(user, [called, ...words], dbPath, realDbPath));
      for (const warning of warningsOf([file, ...words], realDbPath))
        context.terminal.note(`warning: ${warning}`);
    });
}

/**
 * The path that davit was called by, unless the unit would not see it: if it is a link, an upgrade may have it lead to
 * another file than this `file`.
 */
function calledPath(file: string, searchPath = ''): string {
  const environment = { PATH: searchPath };
  const called = commandPath({ command: [process.argv0], directory: '.', environment });
  if (called === undefined || realPath(called) !== realPath(file)) return file;
  const path = absolutePath(called);
  return path === resolve(path) && hidersOf(path).length === 0 ? path : file;
}

/** Quotes do not hold a line end: what comes after it would be a setting. */
function refuseControls(paths: readonly string[]): void {
  const unfit = paths.find((path) => /\p{Cc}/u.test(path));
  if (unfit === undefined) return;
  throw new AppError(
    'invalid_request',
    `a unit file cannot hold the control characters of ${unfit}: choose another path`,
  );
}

/** The paths that these settings hide from the unit, systemd.exec(5). */
const HIDDEN = [
  ['ProtectHome=yes', /^\/(?:home|root|run\/user)\//],
  ['PrivateTmp=yes', /^(?:\/var)?\/tmp\//],
] as const;

/** Warns of files that the unit needs and would not see. */
function warningsOf(programs: readonly string[], dbPath: string): string[] {
  const install = 'install davit as /usr/local/bin/davit, and have that print the unit';
  const choose = `choose another place with --db, such as ${STATE_DIRECTORY}/davit.db`;
  return [...programs.flatMap((path) => warningsOfOne(path, install)), ...warningsOfOne(dbPath, choose)];
}

function warningsOfOne(path: string, advice: string): string[] {
  return hidersOf(path).map((setting) => `${setting} hides ${printable(path)} from the unit: ${advice}`);
}

function hidersOf(path: string): string[] {
  return HIDDEN.filter(([, form]) => form.test(path)).map(([setting]) => setting);
}

function unitText(user: string, program: readonly string[], dbPath: string, realDbPath: string): string {
  const command = [...program, 'serve', '--db', dbPath].map(quotedToRun).join(' ');
  const directory = dirname(realDbPath);
  const isElsewhere = !realDbPath.startsWith(`${STATE_DIRECTORY}/`);
  const home = isElsewhere ? quoteForBash(directory) : STATE_DIRECTORY;
  // No StateDirectory= for a database elsewhere: another service may have that directory, and systemd would give it, with
  // all files in it, to the user of this one.
  const place = isElsewhere
    ? [`ReadWritePaths=${quoted(directory)}`, ...(user === USER ? HOME_OF_USER : [])]
    : ['StateDirectory=davit', 'StateDirectoryMode=0700'];
  return `\
# Made by davit admin systemd-unit, for /etc/systemd/system/davit.service. Then:
#   useradd --system --home-dir ${home} --shell /usr/sbin/nologin ${user}
${isElsewhere ? directoryLine(user, directory) : ''}\
#   systemctl daemon-reload && systemctl enable --now davit
# Options go to /etc/davit.env as variables: DAVIT_LISTEN=0.0.0.0:443 (davit serve --help), but not DAVIT_DB: the file is
# named in ExecStart=.

[Unit]
Description=davit, a deployment service
Wants=network-online.target
# The clock first, where systemd-time-wait-sync.service waits for it: davit goes by it in what it removes and sends again.
After=network-online.target time-sync.target
${isElsewhere ? `RequiresMountsFor=${quoted(directory)}\n` : ''}\
# On a full disk each start fails: davit is to be back when there is room again, however long that takes.
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart=${command}
# Reloads certificates and keys.
ExecReload=/bin/kill -HUP $MAINPID
EnvironmentFile=-/etc/davit.env
User=${user}
${place.join('\n')}
# Files that commands create are for this user alone too, unless they set umask 022 themselves.
UMask=0077
Restart=on-failure
RestartSec=1
# It refuses an option, and would again.
RestartPreventExitStatus=2

# SIGTERM goes to davit alone: it ends its commands itself, and records how they ended.
KillMode=mixed
TimeoutStopSec=40
# A command that uses up all memory is killed; davit is not, and records that.
OOMPolicy=continue
LimitNOFILE=65536

# Directories that the commands of projects write to, one line for each:
#ReadWritePaths=/srv/website
# For ports below 1024, in place of the empty set below; commands may listen on them, too, then:
#AmbientCapabilities=CAP_NET_BIND_SERVICE
#CapabilityBoundingSet=CAP_NET_BIND_SERVICE
CapabilityBoundingSet=
NoNewPrivileges=yes
# No ProtectProc=: davit must see all processes of its commands, even those that protect their memory, as ssh-agent does.
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
`;
}

/** Where the README makes it; a missing one is no failure. */
const HOME_OF_USER = ['# The home of davit, for its commands.', `ReadWritePaths=-${STATE_DIRECTORY}`];

/** How to make the directory, or that it cannot be used as it is. */
function directoryLine(user: string, directory: string): string {
  const there = statusOf(directory);
  if (there === undefined)
    return `#   install -d -o ${user} -m 700 ${quoteForBash(directory)}   # unless it is there\n`;
  const owner = nameOfUser(there.uid);
  if (owner === user) return '';
  return `#   # ${directory} belongs to ${owner}: with --db, give ${user} a directory of its own\n`;
}

/** Quotes a word of a command line, systemd.service(5), where $ begins a variable. */
function quotedToRun(word: string): string {
  return quoted(word).replaceAll('$', '$$$$');
}

/** Quotes a word of a unit file, systemd.syntax(7), where % begins a specifier. */
function quoted(word: string): string {
  const escaped = word.replaceAll('%', '%%');
  return /^[\w@%+=:,./$-]+$/.test(word)
    ? escaped
    : `"${escaped.replaceAll('\\', '\\\\').replaceAll('"', '\\"')}"`;
}

function userOf(text: string): string {
  if (/^[a-z_][a-z0-9_-]{0,31}$/.test(text)) return text;
  throw new InvalidArgumentError('It must be the name of a user, in lower case.');
}
