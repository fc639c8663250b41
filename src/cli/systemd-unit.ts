import { resolve } from 'node:path';
import { type Command, InvalidArgumentError } from 'commander';
import { selfCommand } from '../assets.ts';
import { option } from '../options.ts';
import { printable } from '../printable.ts';
import { type CommandContext, dbPathOf, explain } from './command.ts';

const STATE_DIRECTORY = '/var/lib/davit';

/** `davit admin systemd-unit`. */
export function defineSystemdUnit(command: Command, context: CommandContext): void {
  explain(
    command,
    'Prints a unit file that runs this davit as a service: told when it is ready, stopped so that it can end its ' +
      'commands, and allowed to write to its own directory only. The commands of the projects live in the same bounds: ' +
      'open with ReadWritePaths= what they deploy to.',
    [
      'davit admin systemd-unit | sudo tee /etc/systemd/system/davit.service',
      'davit admin systemd-unit --user www-data --db /srv/davit/davit.db',
    ],
  )
    .addOption(option('--user <name>', 'whom it runs as').argParser(userOf).default('davit'))
    .action(({ user }: { user: string }) => {
      const isTold = command.getOptionValueSourceWithGlobals('db') !== 'default';
      const dbPath = isTold ? resolve(dbPathOf(command)) : `${STATE_DIRECTORY}/davit.db`;
      const { file, arguments: words } = selfCommand();
      context.terminal.print(unitText(user, [file, ...words], dbPath));
      for (const warning of warningsOf([file, ...words], dbPath))
        context.terminal.note(`warning: ${warning}`);
    });
}

/** What these settings of the unit hide from it, systemd.exec(5). */
const HIDDEN = [
  ['ProtectHome=yes', /^\/(?:home|root|run\/user)\//],
  ['PrivateTmp=yes', /^(?:\/var)?\/tmp\//],
] as const;

/** Why the unit could not start: it would not see these files. */
function warningsOf(programs: readonly string[], dbPath: string): string[] {
  const hiding = (path: string) => HIDDEN.flatMap(([setting, form]) => (form.test(path) ? setting : []));
  return [
    ...programs.flatMap((path) =>
      hiding(path).map(
        (setting) =>
          `${setting} hides ${printable(path)} from the unit: install davit as /usr/local/bin/davit, and let that print it`,
      ),
    ),
    ...hiding(dbPath).map(
      (setting) =>
        `${setting} hides ${printable(dbPath)} from the unit: choose another place with --db, ${STATE_DIRECTORY}/davit.db as a rule`,
    ),
  ];
}

function unitText(user: string, program: readonly string[], dbPath: string): string {
  const command = [...program, 'serve', '--db', dbPath].map(quotedToRun).join(' ');
  const place = dbPath.startsWith(`${STATE_DIRECTORY}/`)
    ? ['StateDirectory=davit', 'StateDirectoryMode=0700']
    : [`ReadWritePaths=${quoted(resolve(dbPath, '..'))}`];
  return `\
# Made by davit admin systemd-unit, for /etc/systemd/system/davit.service. Then:
#   useradd --system --home-dir ${STATE_DIRECTORY} --shell /usr/sbin/nologin ${user}
#   systemctl daemon-reload && systemctl enable --now davit
# Options go to /etc/davit.env as variables: DAVIT_LISTEN=0.0.0.0:443 (davit serve --help).

[Unit]
Description=davit, a deployment service
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
# It speaks by systemd-notify, which is another process of the unit.
NotifyAccess=all
ExecStart=${command}
# Reads certificates and keys anew.
ExecReload=/bin/kill -HUP $MAINPID
EnvironmentFile=-/etc/davit.env
User=${user}
${place.join('\n')}
# What commands make is for this user alone too, unless they say umask 022 themselves.
UMask=0077
Restart=on-failure
RestartSec=1

# SIGTERM to davit alone: it ends its commands itself, and records how they ended.
KillMode=mixed
TimeoutStopSec=40
# A command that takes all memory is killed; davit is not, and records that.
OOMPolicy=continue
LimitNOFILE=65536

# What the commands of projects write to besides their own directories: one line for each.
#ReadWritePaths=/srv/website
# For ports below 1024, in place of the empty set below.
#AmbientCapabilities=CAP_NET_BIND_SERVICE
#CapabilityBoundingSet=CAP_NET_BIND_SERVICE
CapabilityBoundingSet=
NoNewPrivileges=yes
# No ProtectProc=: davit looks after all that its commands start, also what guards its memory, as ssh-agent does.
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

/** The same in a command line, systemd.service(5): a $ would begin a variable. */
function quotedToRun(word: string): string {
  return quoted(word).replaceAll('$', '$$$$');
}

/** As a unit file takes it, systemd.syntax(7): a % would begin something else. */
function quoted(word: string): string {
  const escaped = word.replaceAll('%', '%%');
  return /^[\w@%+=:,./$-]+$/.test(word)
    ? escaped
    : `"${escaped.replaceAll('\\', '\\\\').replaceAll('"', '\\"')}"`;
}

function userOf(text: string): string {
  if (/^[a-z_][a-z0-9_-]{0,31}$/.test(text)) return text;
  throw new InvalidArgumentError('It must be the name of a user, in small letters.');
}
