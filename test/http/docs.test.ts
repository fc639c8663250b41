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
    const section = sectionOf(page, 'getLogs');
    for (const name of ['Log-Next-Offset', 'X-Accel-Buffering'])
      t.ok(section.includes(`<code>${name}</code>`), name);
    t.equal(page.split('Headers of answers').length, 2);
  });

  t.test('tells of a field its type, bounds and default, and whether it is required', async (t) => {
    t.match(fieldsOf(page, 'getDeployment'), {
      deployment_id: 'string, at most 64 characters, required',
      wait: 'integer, 0 to 60, 0 by default',
    });
    t.match(fieldsOf(page, 'listDeployments'), {
      limit: 'integer, at least 1, 50 by default',
      cursor: 'string, 1 to 1024 characters',
      status: 'list of queued running canceling succeeded failed canceled',
      created_after: 'date-time',
    });
    t.match(fieldsOf(page, 'createWebhook'), {
      url: 'string, at most 2048 characters, required',
      events: /^list of deployment\.succeeded .*, not empty, required$/,
      description: 'string or null, at most 256 characters',
    });
    t.match(fieldsOf(page, 'object-Deployment'), {
      reason: /^exit_code signal .* or null, required$/,
      created_by: 'object or null, required',
      key_id: 'string, at most 64 characters, required',
    });
    t.match(fieldsOf(page, 'object-DeliveryDetails'), {
      payload: 'Event, required',
      attempts: 'list of Attempt, required',
    });
    t.match(fieldsOf(page, 'object-Ping'), { type: '"ping", required' });
  });

  t.test('has the titles, paragraphs and code of descriptions', async (t) => {
    const titles = [...document.info.description.matchAll(/^## (.+)$/gm)].map(([, title = '']) => title);
    t.not(titles.length, 0);
    for (const title of titles) t.ok(page.includes(`<h2>${title}</h2>`), title);
    t.ok(
      sectionOf(page, 'createDeployment').includes(
        '</p><p>Needs the scope <code>deployments:write</code>.</p>',
      ),
    );
  });

  t.test('shows which answers are all the same in a list of their own, and what others hold', async (t) => {
    const [own = '', common = ''] = sectionOf(page, 'createDeployment').split('Common errors');
    t.strictSame(statusesIn(own), ['201', '409', '429']);
    t.match(own, /<dt class="s2">201<\/dt><dd>[^<]+ <a href="#object-Deployment">Deployment<\/a><\/dd>/);
    t.match(own, /<dt class="s4">409<\/dt><dd>[^<]+ <\/dd>/);
    t.match(common, /<dt class="s4">401<\/dt><dd>The key is missing[^<]+ <\/dd>/);
  });

  t.test('shows of an event what is sent, and of an object an example', async (t) => {
    const event = sectionOf(page, 'onDeploymentFailed');
    t.match(event, '<code>your URL (deployment.failed)</code>');
    t.strictSame(figuresIn(event), ['Body']);
    t.strictSame(figuresIn(sectionOf(page, 'object-Delivery')), ['Example']);
    t.strictSame(figuresIn(sectionOf(page, 'createDeployment')), ['Request', '201']);
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
    t.ok(
      unescaped(page).includes(
        '<code>curl "$DAVIT_URL/v2/projects" \\\n  -H "Authorization: Bearer $DAVIT_KEY"</code>',
      ),
      'or read without a body',
    );
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

function sectionOf(page: string, id: string): string {
  const [, after = ''] = page.split(`<article id="${id}"`);
  const [section = ''] = after.split('</article>');
  return section;
}

/** The fields in the tables of a section, each with what it says of its values. */
function fieldsOf(page: string, id: string): Record<string, string> {
  const rows = /<code>(\w+)<\/code>(.*)<\/th>\n<td><div class="type">(.*?)<\/div>/g;
  const fields = [...sectionOf(page, id).matchAll(rows)].map(([, name = '', required = '', type = '']) => [
    name,
    unescaped([type, required].filter((part) => part !== '').join(', ')).replaceAll(/<.*?>/g, ''),
  ]);
  return Object.fromEntries(fields);
}

function statusesIn(section: string): (string | undefined)[] {
  return [...section.matchAll(/<dt class="s\d">(\d+)/g)].map(([, status]) => status);
}

function figuresIn(section: string): (string | undefined)[] {
  return [...section.matchAll(/<figcaption>(.*?)<\/figcaption>/g)].map(([, title]) => title);
}

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
