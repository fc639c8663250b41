import type { Plugin, ResponseObject, ResponseToolkit } from '@hapi/hapi';
import { assetText } from '../assets.ts';
import { singleQuoted } from '../shell-words.ts';
import { anyQuery } from './input-schemas.ts';
import type { JsonSchema } from './json-schema.ts';
import { describeApi } from './openapi.ts';
import type {
  MediaType,
  OpenApiDocument,
  Operation,
  Parameter,
  PathItem,
  Reference,
  Response,
} from './openapi-types.ts';

/** Allows no other origins, no scripts and no framing. */
const PAGE_HEADERS = {
  'Content-Security-Policy':
    "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
  'Referrer-Policy': 'no-referrer',
};

/** `/docs`: the API description for people, rendered at the first request. */
export function docs(): Plugin<void> {
  return {
    name: 'docs',
    register(server) {
      const options = { auth: false, plugins: { input: { query: anyQuery } } } as const;
      let page: Buffer | undefined; // not a string: those who do not take it share its bytes, see send-buffers.ts
      server.route({
        method: 'GET',
        path: '/docs',
        options,
        handler(_request, h) {
          page ??= Buffer.from(renderDocs(describeApi(server)));
          return protectedPage(h, page).type('text/html');
        },
      });
      server.route({
        method: 'GET',
        path: '/docs/docs.css',
        options,
        handler: (_request, h) => protectedPage(h, assetText('docs.css')).type('text/css'),
      });
    },
  };
}

function protectedPage(h: ResponseToolkit, text: string | Buffer): ResponseObject {
  const response = h.response(text);
  for (const [name, value] of Object.entries(PAGE_HEADERS)) response.header(name, value);
  return response;
}

/** Text that is HTML already, so that it is not escaped. */
interface Html {
  html: string;
}

/** Renders `document` as a page without scripts, with a section for each operation. */
export function renderDocs(document: OpenApiDocument): string {
  const sections = sectionsOf(document);
  return html`<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${document.info.title} API</title>
<link rel="stylesheet" href="docs/docs.css">
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<nav aria-label="Contents">
<p class="brand"><a href="#content">${document.info.title}</a> <small>API ${document.info.version}</small></p>
${sections.map(navigation)}
<h2>Objects</h2>
<ul>${Object.keys(document.components.schemas).map((name) => html`<li><a href="#${anchor(name)}">${name}</a></li>`)}</ul>
</nav>
<main id="content">
<header>
<h1>${document.info.title} API</h1>
<p class="lead">This page is made from <a href="v2/openapi.json">v2/openapi.json</a>, an OpenAPI ${document.openapi} description that clients can be generated from.</p>
${prose(document.info.description)}
</header>
${sections.map((section) => tagSection(section, document))}
<section class="tag">
<h2 id="objects">Objects</h2>
${Object.entries(document.components.schemas).map(schemaSection)}
</section>
</main>
</body>
</html>
`.html;
}

interface Section {
  name: string;
  description: string;
  /** `isEvent`: davit sends this request, and `path` is the name of the event. */
  operations: { method: string; path: string; isEvent: boolean; operation: Operation }[];
}

function sectionsOf({ tags, paths, webhooks }: OpenApiDocument): Section[] {
  const all = [...operationsOf(paths, false), ...operationsOf(webhooks, true)];
  return tags.map((tag) => ({
    ...tag,
    operations: all.filter(({ operation }) => operation.tags.includes(tag.name)),
  }));
}

function operationsOf(paths: Record<string, PathItem>, isEvent: boolean): Section['operations'] {
  return Object.entries(paths).flatMap(([path, item]) =>
    Object.entries(item).map(([method, operation]) => ({ method, path, isEvent, operation })),
  );
}

function navigation({ name, operations }: Section): Html {
  return html`<h2><a href="#${anchor(name)}">${capitalised(name)}</a></h2>
<ul>${operations.map(
    ({ operation, method, isEvent }) =>
      html`<li><a href="#${operation.operationId}">${isEvent ? '' : badge(method)}<span>${operation.summary}</span></a></li>`,
  )}</ul>
`;
}

function badge(method: string): Html {
  return html`<b class="method ${method}">${method.toUpperCase()}</b>`;
}

function tagSection({ name, description, operations }: Section, document: OpenApiDocument): Html {
  return html`<section class="tag">
<h2 id="${anchor(name)}">${capitalised(name)}</h2>
<p>${description}</p>
${operations.map((one) => operationSection(one, document))}
</section>
`;
}

function operationSection(
  { method, path, isEvent, operation }: Section['operations'][number],
  document: OpenApiDocument,
): Html {
  const { operationId, summary, description, parameters = [], requestBody, responses } = operation;
  const body = requestBody?.content['application/json'];
  return html`<article id="${operationId}">
<h3><a href="#${operationId}">${summary}</a></h3>
<p class="path">${badge(method)} <code>${isEvent ? `your URL (${path})` : path}</code></p>
<div class="columns">
<div>
${prose(description ?? '')}
${parameterTable('Path', parameters, 'path')}
${parameterTable('Query', parameters, 'query')}
${parameterTable('Headers', parameters, 'header')}
${body === undefined ? '' : html`<h4>Body</h4>${fieldTable(body.schema)}`}
${answers(responses, document)}
${answerHeaders(responses)}
</div>
<div class="examples">
${isEvent ? '' : example('Request', curl(method, path, operation))}
${isEvent ? example('Body', json(body?.example)) : ''}
${Object.entries(responses).map(([status, response]) => responseExample(status, response))}
</div>
</div>
</article>
`;
}

function parameterTable(title: string, parameters: Parameter[], place: Parameter['in']): Html | '' {
  const rows = parameters.filter((parameter) => parameter.in === place);
  if (rows.length === 0) return '';
  return html`<h4>${title}</h4><table><tbody>${rows.map(
    ({ name, required = false, description = '', schema }) => row(name, required, { ...schema, description }),
  )}</tbody></table>`;
}

function fieldTable(schema: JsonSchema): Html {
  if (schema.$ref !== undefined) return html`<p>${typeOf(schema)}</p>`;
  return html`<table><tbody>${Object.entries(schema.properties ?? {}).map(([name, field]) =>
    row(name, schema.required?.includes(name) ?? false, field),
  )}</tbody></table>`;
}

function row(name: string, required: boolean, schema: JsonSchema): Html {
  return html`<tr><th scope="row"><code>${name}</code>${required ? html`<em>required</em>` : ''}</th>
<td><div class="type">${typeOf(schema)}</div>${inline(schema.description ?? '')}${nestedFields(schema)}</td></tr>
`;
}

/** The fields of a nested object, or of the objects in a list. */
function nestedFields(schema: JsonSchema): Html | '' {
  const inner = schema.items ?? schema;
  return inner.properties === undefined ? '' : fieldTable(inner);
}

function typeOf(schema: JsonSchema): Html {
  const { $ref, type = [], items, enum: values, const: only, format, default: byDefault } = schema;
  if ($ref !== undefined) {
    const name = $ref.slice($ref.lastIndexOf('/') + 1);
    return html`<a href="#${anchor(name)}">${name}</a>`;
  }
  if (only !== undefined) return html`<code>${JSON.stringify(only)}</code>`;
  const types = [type].flat();
  const words = types.filter((one) => one !== 'null').join(' or ');
  const shown =
    values !== undefined
      ? html`${values.filter((value) => value !== null).map((value, index) => html`${index === 0 ? '' : ' '}<code>${String(value)}</code>`)}`
      : items !== undefined
        ? html`list of ${typeOf(items)}`
        : html`${format ?? words}`;
  return html`${shown}${types.includes('null') ? ' or null' : ''}${limits(schema)}${
    byDefault === undefined ? '' : html`, <code>${JSON.stringify(byDefault)}</code> by default`
  }`;
}

function limits({ minimum, maximum, minLength, maxLength, minItems }: JsonSchema): string {
  return [
    range(minimum, maximum, ''),
    range(minLength, maxLength, ' characters'),
    minItems === 1 ? 'not empty' : '',
  ]
    .map((text) => (text === '' ? '' : `, ${text}`))
    .join('');
}

function range(from: number | undefined, to: number | undefined, unit: string): string {
  if (from !== undefined && to !== undefined) return `${from} to ${to}${unit}`;
  if (from !== undefined) return `at least ${from}${unit}`;
  return to === undefined ? '' : `at most ${to}${unit}`;
}

/** Errors that are the same for all routes are collapsed. */
function answers(responses: Operation['responses'], document: OpenApiDocument): Html {
  const entries = Object.entries(responses);
  const own = entries.filter(([, { description }]) => description !== undefined);
  const common = entries.filter((entry) => !own.includes(entry));
  const list = (shown: typeof entries): Html =>
    html`<dl class="answers">${shown.map((entry) => answer(entry, document))}</dl>`;
  return html`<h4>Answers</h4>${list(own)}${
    common.length === 0 ? '' : html`<details><summary>Common errors</summary>${list(common)}</details>`
  }`;
}

/** Those that only this operation has. The others are references, as all operations of a kind have them. */
function answerHeaders(responses: Operation['responses']): Html | '' {
  const rows = Object.values(responses)
    .flatMap((response) => ('$ref' in response ? [] : Object.entries(response.headers ?? {})))
    .flatMap(([name, header]) =>
      '$ref' in header ? [] : [row(name, false, { ...header.schema, description: header.description ?? '' })],
    );
  return rows.length === 0 ? '' : html`<h4>Headers of answers</h4><table><tbody>${rows}</tbody></table>`;
}

function answer([status, response]: [string, Response | Reference], document: OpenApiDocument): Html {
  const [first] = '$ref' in response ? [] : Object.values(response.content ?? {});
  return html`<dt class="s${status.slice(0, 1)}">${status}</dt><dd>${inline(descriptionOf(response, document))} ${
    first?.schema.$ref === undefined ? '' : typeOf(first.schema)
  }</dd>`;
}

/** A reference to a shared error may have a description of its own. */
function descriptionOf(response: Response | Reference, document: OpenApiDocument): string {
  if (!('$ref' in response)) return response.description;
  const name = response.$ref.slice(response.$ref.lastIndexOf('/') + 1);
  const target = document.components.responses[name];
  if (target === undefined) throw new Error(`the description has no answer ${name}`);
  return response.description ?? target.description;
}

function responseExample(status: string, response: Response | Reference): Html {
  const content = '$ref' in response ? [] : Object.entries(response.content ?? {});
  return html`${content
    .filter(([, media]) => media.example !== undefined)
    .map(([type, media]) => example(content.length === 1 ? status : `${status} ${type}`, textOf(media)))}`;
}

function textOf({ example }: MediaType): string {
  return typeof example === 'string' ? example : json(example);
}

function example(title: string, text: string): Html {
  return html`<figure><figcaption>${title}</figcaption><pre tabindex="0"><code>${text}</code></pre></figure>`;
}

function json(value: unknown): string {
  return JSON.stringify(value, null, 2);
}

/** POSIX: minimal images have no uuidgen, and curl leaves out a header that is empty. */
const RANDOM_TEXT = "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')";

/** A command for a shell in which DAVIT_URL and DAVIT_KEY are set. */
function curl(method: string, path: string, { parameters = [], requestBody, security }: Operation): string {
  const url = parameters.reduce(
    (text, { name, example }) => text.replace(`{${name}}`, String(example)),
    path,
  );
  const lines = [`curl ${method === 'get' ? '' : `-X ${method.toUpperCase()} `}"$DAVIT_URL${url}"`];
  if (security.length > 0) lines.push('-H "Authorization: Bearer $DAVIT_KEY"');
  if (parameters.some(({ name }) => name === 'Idempotency-Key'))
    lines.push(`-H "Idempotency-Key: ${RANDOM_TEXT}"`);
  const body = requestBody?.content['application/json']?.example;
  if (body !== undefined) {
    lines.push("-H 'Content-Type: application/json'", `-d ${singleQuoted(JSON.stringify(body))}`);
  }
  return lines.join(' \\\n  ');
}

function schemaSection([name, schema]: [string, JsonSchema]): Html {
  const [shown] = schema.examples ?? [];
  return html`<article id="${anchor(name)}">
<h3><a href="#${anchor(name)}">${name}</a></h3>
<div class="columns">
<div>
${prose(schema.description ?? '')}
${fieldTable(schema)}
</div>
<div class="examples">${shown === undefined ? '' : example('Example', json(shown))}</div>
</div>
</article>
`;
}

/** Renders the Markdown that descriptions use: paragraphs, `## titles` and `code`. */
function prose(text: string): Html {
  const blocks = text.split(/\n{2,}/).filter((block) => block !== '');
  return html`${blocks.map((block) =>
    block.startsWith('## ') ? html`<h2>${block.slice(3)}</h2>` : html`<p>${inline(block)}</p>`,
  )}`;
}

function inline(text: string): Html {
  return html`${text.split('`').map((part, index) => (index % 2 === 1 ? html`<code>${part}</code>` : part))}`;
}

function anchor(name: string): string {
  return /^[A-Z]/.test(name) ? `object-${name}` : `tag-${name}`;
}

function capitalised(text: string): string {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

type Content = string | Html | readonly (string | Html)[];

/** A template tag that escapes every value, unless this function made it. */
function html(parts: TemplateStringsArray, ...values: Content[]): Html {
  const filled = values.map((value) => [value].flat().map(escaped).join(''));
  return { html: String.raw({ raw: parts }, ...filled) };
}

function escaped(value: string | Html): string {
  if (typeof value !== 'string') return value.html;
  return value
    .replaceAll('&', '&amp;')
    .replaceAll('<', '&lt;')
    .replaceAll('>', '&gt;')
    .replaceAll('"', '&quot;')
    .replaceAll("'", '&#39;');
}
