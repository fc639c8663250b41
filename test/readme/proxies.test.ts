import { spawn } from 'node:child_process';
import { randomInt } from 'node:crypto';
import { once } from 'node:events';
import { copyFileSync, readFileSync, writeFileSync } from 'node:fs';
import type { IncomingMessage } from 'node:http';
import { type RequestOptions, request } from 'node:https';
import { type AddressInfo, createServer } from 'node:net';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { text } from 'node:stream/consumers';
import t, { type Test } from 'tap';
import { ifHas } from '../helpers/programs.ts';
import { readmeBlock } from '../helpers/readme.ts';
import { CA_PEM } from '../helpers/receiver.ts';
import { place } from '../helpers/service.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/* The README's configurations of proxies, taken out of it and run in front of davit. */

const FIXTURES = join(import.meta.dirname, '../fixtures/tls');

/** Prints a line, and goes on once somebody who followed the log has seen it. */
const COMMAND = `
  echo seen? >&2
  while [ ! -e seen ]; do sleep 0.05; done
  head -c 3000000 /dev/zero | tr '\\0' x`;

/** A program that is run in a directory with its configuration, and certificate and key in one file and in two. */
interface Proxy {
  /** The README's block, for this port in place of 443 and the service in place of 8080. */
  configuration(port: number, service: string): string;
  command: [string, ...string[]];
}

const PROXIES: Record<string, Proxy> = {
  nginx: {
    configuration: (port, service) => `
      daemon off; master_process off; pid pid; error_log stderr emerg;
      events {}
      http {
        access_log off;
        ${['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi'].map((name) => `${name}_temp_path ${name};`).join('\n')}
        ${readmeBlock('nginx.conf')
          .replace('127.0.0.1:8080', service)
          .replace('listen 443', `listen 127.0.0.1:${port}`)
          .replace('/etc/ssl/deploy.example.com.pem', 'localhost.pem')
          .replace('/etc/ssl/private/deploy.example.com.key', 'localhost.key')
          .replace('deploy.example.com', 'localhost')}
      }`,
    command: ['nginx', '-p', '.', '-e', 'stderr', '-c', 'configuration'],
  },
  caddy: {
    configuration: (port, service) =>
      `{\n admin off\n auto_https off\n}\n${readmeBlock('Caddyfile')
        .replace('127.0.0.1:8080', service)
        .replace('deploy.example.com {', `https://localhost:${port} {\n tls localhost.pem localhost.key`)}`,
    command: ['caddy', 'run', '--adapter', 'caddyfile', '--config', 'configuration'],
  },
  haproxy: {
    configuration: (port, service) =>
      readmeBlock('haproxy.cfg')
        .replace('127.0.0.1:8080', service)
        .replace('bind :443', `bind 127.0.0.1:${port}`)
        .replace('/etc/haproxy/deploy.example.com.pem', 'both.pem'),
    command: ['haproxy', '-db', '-f', 'configuration'],
  },
};

for (const [name, proxy] of Object.entries(PROXIES)) {
  t.test(`davit works behind ${name} with the configuration in the README`, ifHas(name), async (t) => {
    const davit = place(t);
    const { id: project } = await davit.davit<{ id: string }>(
      ...['admin', 'project', 'create', '--name', 'site', '--dir', davit.directory],
      ...['--', 'sh', '-c', COMMAND],
    );
    const { secret: key } = await davit.davit<{ secret: string }>(
      ...['admin', 'key', 'create', '--name', 'ci', '--all-scopes', '--all-projects'],
    );
    const service = await davit.serve('--trust-proxy', '127.0.0.1/32');
    const ask = await startProxy(t, proxy, service.url.slice('http://'.length));

    const headers = { Authorization: `Bearer ${key}`, 'Content-Type': 'application/json' };
    const created = await ask(
      `/v2/projects/${project}/deployments`,
      { method: 'POST', headers },
      '{"ref":"v1"}',
    );
    t.equal(created.statusCode, 201);
    const log = `/v2/deployments/${JSON.parse(await text(created)).id}/logs`;

    const followed = await ask(log, { headers: { ...headers, Accept: 'text/event-stream' } });
    let lastLine = '';
    for await (const line of createInterface({ input: followed })) {
      // Only now the command goes on: a proxy that kept the line back would wait for ever.
      if (line === 'data: seen?') writeFileSync(join(davit.directory, 'seen'), '');
      if (line.startsWith('data: ')) lastLine = line;
    }
    t.equal(lastLine, 'data: {"status":"succeeded"}');
    t.equal(
      (await text(await ask(log, { headers }))).length,
      'seen?\n'.length + 3_000_000,
      'a large log is whole',
    );

    const tooLarge = await ask('/v2/webhooks', { method: 'POST', headers }, 'x'.repeat(100_000));
    t.match(JSON.parse(await text(tooLarge)), { error: { code: 'payload_too_large' } });

    // Another one is free each second that these take.
    const failures = Array.from({ length: 120 }, (_, index) =>
      ask('/v2/projects', {
        localAddress: '127.0.0.2',
        headers: { Authorization: 'Bearer wrong', 'X-Forwarded-For': `203.0.113.${index}` },
      }),
    );
    const statuses = (await Promise.all(failures)).map((answer) => answer.resume().statusCode);
    t.ok(statuses.filter((status) => status === 401).length >= 60);
    t.ok(statuses.includes(429), 'X-Forwarded-For of a client does not change its address');
    const other = await ask('/v2/projects', { headers: { Authorization: 'Bearer wrong' } });
    t.equal(other.resume().statusCode, 401, 'another address');
  });
}

/** Starts it in front of the service at this host and port; gives what makes a request of it. */
async function startProxy(t: Test, { configuration, command }: Proxy, service: string) {
  const directory = temporaryDirectory(t);
  const port = await freePort();
  // Named from there: each has other rules for odd letters in paths, as those of a clone or TMPDIR may have.
  writeFileSync(join(directory, 'configuration'), configuration(port, service));
  const [certificate, key] = ['localhost.pem', 'localhost.key'].map((name) => {
    copyFileSync(join(FIXTURES, name), join(directory, name));
    return readFileSync(join(FIXTURES, name), 'utf8');
  });
  writeFileSync(join(directory, 'both.pem'), `${certificate}${key}`);
  const [program, ...words] = command;
  const child = spawn(program, words, {
    cwd: directory,
    env: { PATH: process.env['PATH'], HOME: directory, XDG_CONFIG_HOME: directory, XDG_DATA_HOME: directory },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  const ended = once(child, 'exit');
  const complaints = text(child.stderr);
  t.teardown(async () => {
    child.kill('SIGKILL');
    await ended;
  });

  const ask = async (path: string, options: RequestOptions, body = '') => {
    const asked = request({ host: 'localhost', port, path, ca: CA_PEM, agent: false, family: 4, ...options });
    asked.end(body);
    const [response] = await once(asked, 'response');
    return response as IncomingMessage;
  };
  for (;;) {
    try {
      (await ask('/readyz', {})).resume();
      return ask;
    } catch (error) {
      if (child.exitCode !== null) throw new Error(`${program}: ${await complaints}`, { cause: error });
    }
  }
}

/**
 * None of them tells which port it took of itself. One below those that the kernel gives out: before the proxy has it,
 * another test that runs at the same time could get any of these.
 */
async function freePort(): Promise<number> {
  for (;;) {
    const server = createServer().listen(randomInt(10_000, 30_000), '127.0.0.1');
    try {
      await once(server, 'listening');
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code === 'EADDRINUSE') continue;
      throw error;
    }
    const { port } = server.address() as AddressInfo;
    server.close();
    await once(server, 'close');
    return port;
  }
}
