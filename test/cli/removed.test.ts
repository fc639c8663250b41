import { rmSync } from 'node:fs';
import t from 'tap';
import type { ProjectDetails } from '../../src/store/projects.ts';
import { place } from '../helpers/cli.ts';
import { serve } from '../helpers/served.ts';

for (const side of ['-wal', '-shm']) {
  t.test(`without the ${side} that its service has, nothing is read or written by its name`, async (t) => {
    const { davit, json, dump, dbPath, directory } = place(t);
    const service = await serve(t, directory);
    await davit(['admin', 'project', 'create', '--name', 'website']);
    rmSync(dbPath + side);
    const message = new RegExp(
      `^error: \\S+/davit\\.db${side} was removed or replaced while process ${service.processId} serves .*: stop that one first`,
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
