import { execFileSync } from 'node:child_process';
import t from 'tap';
import { assetText } from '../../src/assets.ts';
import { docs, renderDocs } from '../../src/http/docs.ts';
import { health } from '../../src/http/health.ts';
import { METHODS } from '../../src/http/openapi-types.ts';
import { requestJson, startHttp } from '../helpers/http.ts';
import { startWholeService } from '../helpers/whole-service.ts';

t.test('the page /docs', async (t) => {
  const { url, contract } = await startWholeService(t);
  const { document } = contract;
  const response = await fetch(`${url}/docs`);
  const page = await response.text();

  t.test('is HTML that loads nothing but its style sheet, and runs nothing', async (t) => {
    t.equal(response.status, 200);
    t.equal(response.headers.get('content-type'), 'text/html; charset=utf-8');
    t.equal(
      response.headers.get('content-security-policy'),
      "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    );
    t.equal(response.headers.get('x-content-type-options'), 'nosniff');
    t.equal(response.headers.get('referrer-policy'), 'no-referrer');
    t.notMatch(page, /<(?:script|style|iframe|img|object|embed|form|base)\b/i);
    t.notMatch(page, /\s(?:on[a-z]+|style|src|srcset)\s*=\s*"/i);
    t.strictSame(
      [...page.matchAll(/<link [^>]*href="([^"]*)"/g)].map(([, href]) => href),
      ['docs/docs.css'],
    );
  });

  t.test('has a style sheet that loads nothing', async (t) => {
    const sheet = await fetch(new URL('docs/docs.css', `${url}/docs`));
    t.equal(sheet.status, 200);
    t.equal(sheet.headers.get('content-type'), 'text/css; charset=utf-8');
    const text = await sheet.text();
    t.match(text, /@media/);
    t.notMatch(text, /@import|url\(|@font-face/);
  });

  t.test('prints examples whole, and in the colour of the text', async (t) => {
    const [, print = ''] = assetText('docs.css').split('@media print');
    t.match(print, /figure \{[^}]*color: inherit/);
    t.match(print, /pre \{[^}]*max-height: none;[^}]*white-space: pre-wrap/);
  });

  t.test('describes every operation, event and object exactly once', async (t) => {
    for (const [path, item] of [...Object.entries(document.paths), ...Object.entries(document.webhooks)]) {
      for (const method of METHODS) {
        const operation = item[method];
        if (operation === undefined) continue;
        t.equal(page.split(`id="${operation.operationId}"`).length, 2, operation.operationId);
        t.ok(page.includes(operation.summary), operation.summary);
        t.ok(page.includes(path), path);
      }
    }
    for (const name of Object.keys(document.components.schemas)) {
      t.equal(page.split(`id="object-${name}"`).length, 2, name);
    }
  });

  t.test('shows the headers that only the answers of one operation have', async (t) => {
    const [, logs = ''] = page.split('id="getLogs"');
    const [section = ''] = logs.split('</article>');
    for (const name of ['Log-Next-Offset', 'X-Accel-Buffering'])
      t.ok(section.includes(`<code>${name}</code>`), name);
    t.equal(page.split('Headers of answers').length, 2);
  });

  t.test('links only to places on the page and to the description', async (t) => {
    const ids = new Set([...page.matchAll(/ id="([^"]+)"/g)].map(([, id]) => id));
    const links = [...page.matchAll(/<a [^>]*href="([^"]+)"/g)].map(([, href = '']) => href);
    t.strictSame([...new Set(links.filter((href) => !href.startsWith('#')))], ['v2/openapi.json']);
    t.strictSame(
      links.filter((href) => href.startsWith('#') && !ids.has(href.slice(1))),
      [],
    );
  });

  t.test('shows how to create a deployment with curl', async (t) => {
    t.ok(
      page.includes(
        'curl -X POST &quot;$DAVIT_URL/v2/projects/prj_Vb4mYpQx8Z2kLrT7vNbC1dWe/deployments&quot;',
      ),
    );
    t.ok(page.includes('-d &#39;{&quot;ref&quot;:&quot;main&quot;}&#39;'));
    const key = /-H (&quot;Idempotency-Key: .+?&quot;) /.exec(page)?.[1] ?? '';
    const shown = execFileSync('/bin/sh', ['-c', `printf %s ${unescaped(key)}`], { encoding: 'utf8' });
    t.match(shown, /^Idempotency-Key: [0-9a-f]{32}$/, 'a new one at each call');
  });

  t.test('has balanced tags', async (t) => {
    t.strictSame(unbalanced(page), []);
  });

  t.test('needs no key, ignores query parameters, and rejects unknown methods and files', async (t) => {
    for (const path of ['/docs', '/docs/docs.css']) {
      t.equal((await fetch(`${url}${path}?utm_source=chat`)).status, 200, path);
      t.match((await fetch(`${url}${path}`, { method: 'POST' })).headers.get('allow'), 'GET, HEAD', path);
    }
    t.equal((await fetch(`${url}/docs/nothing.css`)).status, 404);
    t.equal((await fetch(`${url}/docs/..%2fdocs.css`)).status, 404);
  });
});

t.test('every text of the description is escaped on the page', async (t) => {
  const { port } = await startHttp(t, { resources: () => [health(async () => null), docs()] });
  t.match(await requestJson(port, 'GET', '/healthz'), { status: 200 });
  const nasty = `<script>alert("1")</script>&'`;
  const page = renderDocs({
    openapi: '3.1.1',
    info: { title: nasty, version: nasty, description: `## ${nasty}\n\n\`${nasty}\`` },
    servers: [],
    tags: [{ name: 'things', description: nasty }],
    paths: {
      '/v2/things': {
        get: {
          operationId: 'getThings',
          summary: nasty,
          description: nasty,
          tags: ['things'],
          security: [],
          parameters: [
            { name: nasty, in: 'query', description: nasty, schema: { type: 'string', enum: [nasty] } },
          ],
          responses: {
            200: { description: nasty, content: { 'text/plain': { schema: {}, example: nasty } } },
          },
        },
      },
    },
    webhooks: {},
    components: { schemas: {}, responses: {}, headers: {}, securitySchemes: {} },
  });
  t.notMatch(page, '<script');
  t.notMatch(page, "&'");
  t.ok(page.split('&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#39;').length > 8);
});

const VOID_ELEMENTS = new Set(['meta', 'link', 'br']);

/** Tags that close what is not open, or never close. */
function unbalanced(page: string): string[] {
  const open: string[] = [];
  const wrong: string[] = [];
  for (const [, slash, name = ''] of page.matchAll(/<(\/?)([a-z][a-z0-9]*)\b[^>]*>/g)) {
    if (VOID_ELEMENTS.has(name)) continue;
    if (slash === '') open.push(name);
    else if (open.pop() !== name) wrong.push(name);
  }
  return [...wrong, ...open];
}

function unescaped(html: string): string {
  return html.replaceAll('&quot;', '"').replaceAll('&#39;', "'");
}
