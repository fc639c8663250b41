import { join } from 'node:path';
import t from 'tap';
import { MAIN, place } from '../helpers/cli.ts';
import { ifMayServeDns, runWithOwnDns } from '../helpers/namespaces.ts';
import { NOWHERE } from '../helpers/nowhere.ts';

/** A service that has no name between its first answer and the client's next try but one. */
const LOSES_ITS_NAME = `
  import { spawn } from 'node:child_process';
  import { writeFileSync } from 'node:fs';
  import { createServer } from 'node:http';
  const [main, hosts, name] = process.argv.slice(1);
  const made = { id: 'dpl_1', project_id: 'prj_1', ref: 'main', status: 'queued', reason: null, message: null,
    created_at: '2026-11-21T08:00:00.000Z', duration_ms: null, exit_code: null, signal: null, superseded_by: null, queue_position: 1 };
  const server = createServer((request, response) => {
    const isMaking = request.method === 'POST';
    if (isMaking) writeFileSync(hosts, '');
    response.writeHead(isMaking ? 201 : 200, { Connection: 'close' });
    response.end(JSON.stringify(isMaking ? made : { ...made, status: 'succeeded' }));
  }).listen(0, '127.0.0.1', () => {
    const url = 'http://' + name + ':' + server.address().port;
    const client = spawn(process.execPath, [main, 'deploy', 'prj_1', 'main', '--wait', '--json', '--url', url],
      { env: { DAVIT_KEY: 'davit_key' }, stdio: ['ignore', 'inherit', 'pipe'] });
    client.stderr.on('data', (piece) => {
      process.stdout.write(piece);
      if (String(piece).includes('trying again')) writeFileSync(hosts, '127.0.0.1 ' + name);
    });
    client.on('close', (code) => {
      console.log('exit code ' + code);
      server.close();
    });
  });`;

t.test('a name that loses its address while deploy waits is looked up again', ifMayServeDns, (t) => {
  const { directory } = place(t);
  const { stdout, stderr } = runWithOwnDns(
    directory,
    `127.0.0.1 ${NOWHERE}\n`,
    ...[process.execPath, '--input-type=module', '-e', LOSES_ITS_NAME],
    ...[MAIN, join(directory, 'hosts'), NOWHERE],
  );
  t.match(stdout, /cannot be reached \(ENOTFOUND\): trying again/, stderr);
  t.match(stdout, /"status": "succeeded"[\s\S]*exit code 0\n$/);
  t.end();
});
