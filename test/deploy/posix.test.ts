import t from 'tap';
import { posix } from '../helpers/commands.ts';

t.test('an error before the start has the code of the system, as any later one has', async (t) => {
  const program = { path: '/bin/true', arguments: ['true'], environment: {}, directory: '/', output: -1 };
  await t.rejects(posix.spawn(program), { code: 'EBADF', message: 'posix_spawn: EBADF' });
});
