import t from 'tap';
import { nearest } from '../../src/cli/suggest.ts';
import { SCOPES } from '../../src/domain.ts';

t.test('a typing error suggests the nearest word', async (t) => {
  t.equal(nearest('deployment:write', SCOPES), 'deployments:write');
  t.equal(nearest('Projects:Read', SCOPES), 'projects:read');
  t.equal(nearest('log:read', SCOPES), 'logs:read');
  t.equal(nearest('webstie', ['api', 'website']), 'website');
  t.equal(nearest('lsit', ['set', 'list']), 'list', 'transposed letters');
});

t.test('a word far from all others suggests nothing', async (t) => {
  t.equal(nearest('admin', SCOPES), undefined);
  t.equal(nearest('', SCOPES), undefined);
  t.equal(nearest('x', []), undefined);
  t.equal(nearest('', ['']), undefined);
  t.equal(nearest('remove', ['restore']), undefined);
  t.equal(nearest('--json', ['--version']), undefined);
});
