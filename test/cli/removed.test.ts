import { renameSync, rmSync } from 'node:fs';
import t from 'tap';
import type { ProjectDetails } from '../../src/store/projects.ts';
import { place } from '../helpers/cli.ts';
import { serve } from '../helpers/served.ts';

const WAYS = {
  removed: (file: string) => rmSync(file),
  moved: (file: string) => renameSync(file, `${file}.elsewhere`),
};

for (const [side, way] of [
  ['-wal', 'removed'],
  ['-shm', 'removed'],
  ['-shm', 'moved'],
] as const) {
  t.test(`while a served file's ${side} is ${way}, every other command refuses the file`, async (t) => {
    const { davit, json, dump, dbPath, directory } = place(t);
    const service = await serve(t, directory);
    await davit(['admin', 'project', 'create', '--name', 'website']);
    WAYS[way](dbPath + side);
    const message = new RegExp(
      `^error: /.*/davit\\.db${side} was moved, removed or replaced while process ${service.processId} serves .*: stop that one first`,
    );
    const commands = [
      ['admin', 'project', 'create', '--name', 'lost'],
      ['admin', 'project', 'list'],
      ['backup', 'copy.db'],
      ['doctor'],
    ];
    for (const words of commands) {
      const { exitCode, stdout, stderr } = await davit(words);
      t.match({ exitCode, stdout, stderr }, { exitCode: 1, stdout: '', stderr: message });
    }
    await service.stop();
    t.match(dump()['projects'], [{ name: 'website' }]);
    t.match(await json<ProjectDetails[]>(['admin', 'project', 'list']), [{ name: 'website' }]);
  });
}
