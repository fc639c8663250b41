import { methodNotAllowed } from '@hapi/boom';
import type { Request, Server } from '@hapi/hapi';
import { invalid } from '../errors.ts';
import { notFound } from './errors.ts';

/** Checks what hapi would accept, or answer in its own way: repeated headers, the path, the syntax of the query. */
export function checkHead(request: Request): void {
  checkHeaders(request);
  checkPath(request);
  checkQuerySyntax(request);
}

/**
 * Registers a route for everything that no other route matches. Returns a check that throws for a request to it. Call
 * that before the body is read: hapi would read any body to get to the handler.
 */
export function registerCatchAll(server: Server): (request: Request) => void {
  server.route({
    method: '*',
    path: CATCH_ALL,
    options: { auth: false },
    handler: (request) => refuseRoute(server, request),
  });
  return (request) => {
    if (request.route.path === CATCH_ALL) refuseRoute(server, request);
  };
}

/**
 * HTTP/1.1 has exactly one Host (RFC 9112, 3.2). Of a repeated Authorization or Content-Type Node silently takes the
 * first, and a proxy perhaps the last: the two could disagree on who calls, or on what was sent.
 */
function checkHeaders({ raw: { req } }: Request): void {
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
 * For `foo://bar`, whose path is empty, hapi's router throws an error that nothing catches, which would end davit. Bad
 * percent-encoding hapi would answer with 400 too, but only after it has read the whole body.
 */
function checkPath({ path, raw: { req } }: Request): void {
  if (!path.startsWith('/')) throw invalid('path', 'path', 'must begin with /');
  if (BACKSLASH_OR_DOT_SEGMENT.test(req.url?.split('?', 1)[0] ?? '')) throw notFound();
  if (path.includes('%') && decoded(path) === undefined)
    throw invalid('path', 'path', 'is not valid percent-encoding');
}

/** Such paths `URL` rewrites before hapi sees them: they could bypass a proxy that lets only certain paths through. */
const BACKSLASH_OR_DOT_SEGMENT = /\\|\/(?:\.|%2e){1,2}(?:\/|$)/i;

/** hapi would replace invalid UTF-8, and drop parameters beyond the thousandth. */
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

const CATCH_ALL = '/{any*}';

const QUERY_MAX_PARAMETERS = 100;

function decoded(text: string): string | undefined {
  try {
    return decodeURIComponent(text);
  } catch {
    return undefined;
  }
}

/** Throws 405 with the allowed methods if the path exists with other methods, else 404. */
function refuseRoute(server: Server, { path }: Request): never {
  const allowed = METHODS.filter((method) => hasRoute(server, method, path));
  if (allowed.length === 0) throw notFound();
  throw methodNotAllowed('', null, allowed.includes('GET') ? ['GET', 'HEAD', ...allowed.slice(1)] : allowed);
}

const METHODS = ['GET', 'POST', 'PUT', 'PATCH', 'DELETE'] as const;

function hasRoute(server: Server, method: (typeof METHODS)[number], path: string): boolean {
  const route = server.match(method, path);
  return route !== null && route.path !== CATCH_ALL;
}
