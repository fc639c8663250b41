import { methodNotAllowed } from '@hapi/boom';
import type { Request, Server } from '@hapi/hapi';
import { invalid } from '../errors.ts';
import { isFromSocket } from './body.ts';
import { notFound } from './errors.ts';

/** What hapi leaves to the handler or answers in its own way: headers that tell where and who, the path, the query's syntax. */
export function checkHead(request: Request): void {
  checkHeaders(request);
  checkPath(request);
  checkQuerySyntax(request);
}

/**
 * A route for whatever no other is for. What it returns throws for a request that leads there, to be called before the
 * request's body is looked at: hapi would take in whatever comes to get past it.
 */
export function unknownRoutes(server: Server): (request: Request) => void {
  server.route({
    method: '*',
    path: UNKNOWN_ROUTE,
    options: { auth: false },
    handler: (request) => refuseRoute(server, request),
  });
  return (request) => {
    if (request.route.path === UNKNOWN_ROUTE) refuseRoute(server, request);
  };
}

/**
 * RFC 9112, 3.2: exactly one Host in HTTP/1.1. Of the others Node takes the first in silence, and a proxy perhaps the last:
 * whoever called, or what was sent, would depend on whom one asks.
 */
function checkHeaders({ raw: { req } }: Request): void {
  if (!isFromSocket(req)) return;
  const seen: string[] = [];
  for (let index = 0; index < req.rawHeaders.length; index += 2) {
    const name = SENT_ONCE.get(req.rawHeaders[index]?.toLowerCase() ?? '');
    if (name === undefined) continue;
    if (seen.includes(name)) throw invalid('header', name, 'must be sent once');
    seen.push(name);
  }
  const { host } = req.headers;
  if (host === undefined && req.httpVersion === '1.1') throw invalid('header', 'Host', 'must be sent once');
  if (host !== undefined && !HOST.test(host)) throw invalid('header', 'Host', 'must be a name or an address');
}

const SENT_ONCE = new Map(
  ['Host', 'Authorization', 'Content-Type'].map((name) => [name.toLowerCase(), name] as const),
);

/** RFC 3986, 3.2.2 and 3.2.3. */
const HOST = /^(?:[\w.~!$&'()*+,;=%-]*|\[[\w.:%~-]+\])(?::\d*)?$/;

/**
 * Of a request for `foo://bar`, whose path is empty, hapi's router throws where nobody catches it: davit would end. Bad
 * encoding it would answer with 400 too, but only after taking in the whole body.
 */
function checkPath({ path, raw: { req } }: Request): void {
  if (!path.startsWith('/')) throw invalid('path', 'path', 'must begin with /');
  if (LEADS_ELSEWHERE.test(req.url?.split('?', 1)[0] ?? '')) throw notFound();
  if (path.includes('%') && decoded(path) === undefined)
    throw invalid('path', 'path', 'is not valid percent-encoding');
}

/** What URL makes another path of before hapi sees it: a proxy that lets only some paths in would be led astray. */
const LEADS_ELSEWHERE = /\\|\/(?:\.|%2e){1,2}(?:\/|$)/i;

/** hapi replaces what is no UTF-8, and drops parameters beyond the thousandth. */
function checkQuerySyntax({ raw: { req } }: Request): void {
  const start = req.url?.indexOf('?') ?? -1;
  if (req.url === undefined || start === -1) return;
  const query = req.url.slice(start + 1);
  const text = decoded(query);
  if (text === undefined) throw invalid('query', 'query', 'is not valid percent-encoding');
  if (text.includes('\0')) throw invalid('query', 'query', 'must not contain NUL');
  if (query.split('&', QUERY_MAX_PARAMETERS + 1).length > QUERY_MAX_PARAMETERS) {
    throw invalid('query', 'query', `must have at most ${QUERY_MAX_PARAMETERS} parameters`);
  }
}

const UNKNOWN_ROUTE = '/{any*}';

const QUERY_MAX_PARAMETERS = 100;

function decoded(text: string): string | undefined {
  try {
    return decodeURIComponent(text);
  } catch {
    return undefined;
  }
}

/** 405 with what is allowed, if the path is one of ours with another method; else 404. */
function refuseRoute(server: Server, { path }: Request): never {
  const allowed = METHODS.filter((method) => leadsSomewhere(server, method, path));
  if (allowed.length === 0) throw notFound();
  throw methodNotAllowed('', null, allowed.includes('GET') ? ['GET', 'HEAD', ...allowed.slice(1)] : allowed);
}

const METHODS = ['GET', 'POST', 'PUT', 'PATCH', 'DELETE'] as const;

function leadsSomewhere(server: Server, method: (typeof METHODS)[number], path: string): boolean {
  const route = server.match(method, path);
  return route !== null && route.path !== UNKNOWN_ROUTE;
}
