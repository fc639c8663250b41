import { statfsSync, statSync } from 'node:fs';
import { dirname } from 'node:path';
import type { Command } from 'commander';
import type { Effects } from '../effects.ts';
import { realPath } from '../paths.ts';
import type { TableSize } from '../store/doctor.ts';
import type { Serving } from '../store/holder.ts';
import { walBytesOf } from '../store/wal.ts';
import { formatBytes } from './bytes.ts';
import { type CommandContext, explain, jsonOption } from './command.ts';
import { existingDbPathOf } from './database-file.ts';
import type { Case } from './doctor-case.ts';
import { type Finding, findingsText, isProblem, refuseProblems } from './findings.ts';
import { printJson } from './results.ts';
import { serviceOf, serviceText } from './serving.ts';
import { fields, table } from './table.ts';

/** What `--json` prints. */
interface Report {
  file: string;
  ok: boolean;
  sqlite_version: string | null;
  schema_version: number | null;
  service: Serving | null;
  file_bytes: number;
  wal_bytes: number;
  /** Free space within the file, which is used before the file grows. */
  unused_bytes: number | null;
  disk_free_bytes: number;
  findings: Finding[];
  tables: TableSize[];
}

/** `davit doctor`. */
export function defineDoctor(command: Command, context: CommandContext): void {
  explain(
    command,
    'Looks for what is wrong, or soon will be: a damaged file, a full disk, stuck deployments, failing webhooks, commands ' +
      'that cannot be started, keys that expire. Says what to do about each problem, and changes nothing. Reads the whole ' +
      'file, whether the service runs or not. Exit code 1 if something needs attention. Run it as the user of the service.',
    [
      'davit doctor',
      'davit doctor --json | jq .findings',
      'report=$(davit doctor) || echo "$report" | mail -s davit admin',
    ],
  )
    .addOption(jsonOption())
    .action((options: { json?: boolean }) => diagnose(command, options, context));
}

async function diagnose(
  command: Command,
  options: { json?: boolean },
  context: CommandContext,
): Promise<void> {
  const report = await examine(command, context);
  if (options.json === true) printJson(context, report);
  else printReport(report, context);
  refuseProblems(report.findings, context.terminal);
}

async function examine(command: Command, { effects }: CommandContext): Promise<Report> {
  const dbPath = existingDbPathOf(command);
  const path = realPath(dbPath);
  const [{ refuseMovedHere }, { refuseRemoved }, { tryDisk }] = await Promise.all([
    import('../store/other-names.ts'),
    import('../store/may-open.ts'),
    import('./doctor-disk.ts'),
  ]);
  refuseMovedHere(dbPath);
  refuseRemoved(dbPath, effects);
  const { bavail, bsize } = statfsSync(dirname(path));
  const service = await serviceOf(command);
  const diskTrial = await tryDisk(path, effects);
  const file = { path, service, nowMs: effects.now(), walBytes: walBytesOf(path), diskTrial };
  const fileBytes = statSync(path).size;
  const contents = await examineContents(file, dbPath, effects);
  return {
    file: dbPath,
    ok: !contents.findings.some(isProblem),
    service,
    file_bytes: fileBytes,
    wal_bytes: file.walBytes,
    disk_free_bytes: bavail * bsize,
    ...contents,
  };
}

type Contents = Pick<Report, 'sqlite_version' | 'schema_version' | 'unused_bytes' | 'findings' | 'tables'>;

const NOTHING_READ = { sqlite_version: null, schema_version: null, unused_bytes: null, tables: [] };

/** What the file holds, as far as it can be read, and all findings. */
async function examineContents(file: Case, dbPath: string, effects: Effects): Promise<Contents> {
  const [{ openForExamination }, doctor, { unusable }] = await Promise.all([
    import('../store/doctor.ts'),
    import('./doctor-findings.ts'),
    import('./file-work.ts'),
  ]);
  const ofPlace = doctor.findingsOfPlace(file);
  // To read from it could take for ever.
  if (file.diskTrial === 'noAnswer') return { ...NOTHING_READ, findings: ofPlace };
  let examined: ReturnType<typeof openForExamination>;
  try {
    examined = openForExamination(file.path);
  } catch (error) {
    return { ...NOTHING_READ, findings: doctor.findingsOfUnopened(file, error, ofPlace) };
  }
  if ('kind' in examined) {
    if (examined.kind === 'damaged') {
      return { ...NOTHING_READ, findings: [doctor.damage(examined), ...ofPlace] };
    }
    if (examined.kind !== 'older') throw unusable(examined, dbPath);
    const findings = [...ofPlace, ...doctor.findingsOfOlder(file, examined)];
    return { ...NOTHING_READ, schema_version: examined.schemaVersion, findings };
  }
  try {
    const { examination, reads } = examined;
    const lookedUp = await doctor.lookUp(file, reads, effects);
    return {
      sqlite_version: examination.sqliteVersion(),
      schema_version: examination.schemaVersion(),
      unused_bytes: examination.unusedBytes(),
      findings: [...ofPlace, ...doctor.findingsOfFile(file, examined, lookedUp, effects)],
      tables: examination.tableSizes(),
    };
  } catch (error) {
    return { ...NOTHING_READ, findings: doctor.findingsOfUnopened(file, error, ofPlace) };
  } finally {
    examined.close();
  }
}

function printReport(report: Report, context: CommandContext): void {
  const { terminal } = context;
  const { service, tables, findings } = report;
  terminal.print(
    fields(terminal, [
      ['file', `${report.file}, ${formatBytes(report.file_bytes)}`],
      ['unused in it', report.unused_bytes === null ? null : formatBytes(report.unused_bytes)],
      ['wal', formatBytes(report.wal_bytes)],
      ['disk', `${formatBytes(report.disk_free_bytes)} free`],
      ['service', service === null ? 'none' : serviceText(service, context)],
      ['schema', report.schema_version === null ? null : String(report.schema_version)],
      ['sqlite', report.sqlite_version],
    ]),
  );
  if (tables.length > 0) {
    const columns = [
      { title: 'TABLE', of: ({ name }: TableSize) => name },
      { title: 'ROWS', of: ({ rows }: TableSize) => String(rows) },
      { title: 'SIZE', of: ({ bytes }: TableSize) => formatBytes(bytes) },
    ];
    terminal.print(`\n${table(terminal, tables, columns)}`);
  }
  terminal.print(`\n${findingsText(findings, terminal)}`);
}
