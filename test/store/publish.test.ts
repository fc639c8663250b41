import { chownSync, existsSync, readdirSync, statSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { giveName, giveToOwner, syncDirectory } from '../../src/store/publish.ts';
import { diskCallsOf } from '../helpers/disk-calls.ts';
import { ifMayBeNobody } from '../helpers/nobody.ts';
import { temporaryDirectory } from '../helpers/store.ts';

t.test('a file system that cannot sync directories is no reason to fail, a disk that fails is', async (t) => {
  const directory = temporaryDirectory(t);
  const openFiles = readdirSync('/proc/self/fd').length;
  diskCallsOf(() => syncDirectory(directory), { fsyncSync: 'EINVAL' });
  t.throws(() => diskCallsOf(() => syncDirectory(directory), { fsyncSync: 'EIO' }), { code: 'EIO' });
  t.equal(readdirSync('/proc/self/fd').length, openFiles, 'and none stays open');
});

t.test('a name that is taken is refused, also by a link that leads nowhere', async (t) => {
  const directory = temporaryDirectory(t);
  const [file, link] = [join(directory, 'file'), join(directory, 'link')];
  writeFileSync(file, '');
  symlinkSync(join(directory, 'nowhere'), link);
  t.throws(() => giveName(file, link), { code: 'conflict' });
  t.ok(existsSync(file));
});

t.test('giveToOwner changes the owner of a file, and follows no link', ifMayBeNobody(), async (t) => {
  const directory = temporaryDirectory(t);
  const [file, link] = [join(directory, 'file'), join(directory, 'link')];
  writeFileSync(file, '');
  symlinkSync(file, link);
  giveToOwner([link], { ...statSync(file), uid: 65_534, gid: 65_533 } as never);
  t.match(statSync(file), { uid: 0, gid: 0 });
  chownSync(directory, 65_534, 65_533);
  giveToOwner([file], statSync(directory));
  t.match(statSync(file), { uid: 65_534, gid: 65_533 });
  t.intercept(process, 'getuid', { value: () => 65_534 });
  giveToOwner([file], { uid: 0, gid: 0 } as never);
  t.match(statSync(file), { uid: 65_534, gid: 65_533 }, 'others than root give nothing away');
});
