import { execFile } from 'node:child_process';
import { copyFileSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { registerHooks } from 'node:module';
import { join } from 'node:path';
import { promisify } from 'node:util';
import t, { type Test } from 'tap';
import type { OpenApiDocument } from '../../src/http/openapi-types.ts';
import { startWholeService } from '../helpers/whole-service.ts';

const execute = promisify(execFile);
const ROOT = join(import.meta.dirname, '../..');

t.test('a client generated from the OpenAPI description does the main job', async (t) => {
  const service = await startWholeService(t);
  const { secret } = await service.key({
    scopes: ['projects:read', 'deployments:read', 'deployments:write', 'logs:read', 'webhooks:write'],
  });
  const project = await service.project({ command: ['/bin/sh', '-c', 'echo "deploying $DEPLOY_REF"'] });
  const directory = clientDirectory(t);
  writeFileSync(join(directory, 'api.ts'), await generatedTypes(service.contract.document));

  t.test('the compiler accepts its program, and finds its deliberate mistakes', async (t) => {
    const tsc = join(ROOT, 'node_modules/.bin/tsc');
    // tsc prints its errors to stdout, which the rejection does not show.
    const { stdout } = await execute(tsc, ['-p', directory]).catch((error) => error);
    t.equal(stdout, '');
  });

  t.test('its program deploys, repeats, lists, reads the log and meets errors as typed', async (t) => {
    const program = join(directory, 'main-job.ts');
    const { stdout, stderr } = await execute(process.execPath, [program, service.url, secret, project]);
    t.equal(stderr, '');
    t.strictSame(JSON.parse(stdout), {
      project: 'website',
      deployment: { status: 'succeeded', ref: 'v1.2.3', outcome: 'exit code 0' },
      repeatedAs: 'the same',
      log: 'deploying v1.2.3\n',
      listed: [true],
      missing: 'not_found',
      refused: ['url'],
    });
    t.strictSame(service.query('SELECT ref, status FROM deployments'), [
      { ref: 'v1.2.3', status: 'succeeded' },
    ]);
    t.strictSame(service.query('SELECT * FROM webhooks'), []);
  });
});

/** Below the project, so that the client's packages are found from there. */
function clientDirectory(t: Test): string {
  mkdirSync(join(ROOT, 'build'), { recursive: true });
  const directory = mkdtempSync(join(ROOT, 'build/generated-client-'));
  t.teardown(() => rmSync(directory, { recursive: true }));
  copyFileSync(join(ROOT, 'test/fixtures/generated-client/main-job.ts'), join(directory, 'main-job.ts'));
  writeFileSync(
    join(directory, 'tsconfig.json'),
    JSON.stringify({ extends: '../../tsconfig.json', include: ['.'], exclude: [] }),
  );
  return directory;
}

/**
 * The types that `openapi-typescript` generates. That needs the compiler's programming interface, which
 * TypeScript 7 no longer has: it is given the TypeScript 5 that comes with tap.
 */
async function generatedTypes(document: OpenApiDocument): Promise<string> {
  const tap = import.meta.resolve('@tapjs/test');
  const hooks = registerHooks({
    resolve: (specifier, context, next) =>
      next(specifier, specifier === 'typescript' ? { ...context, parentURL: tap } : context),
  });
  const { default: openapiTypescript, astToString } = await import('openapi-typescript');
  hooks.deregister();
  return astToString(await openapiTypescript(JSON.stringify(document)));
}
