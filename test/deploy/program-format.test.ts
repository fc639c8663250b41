import { execFileSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import t from 'tap';
import { beginningOf, firstLineIn, loaderIn } from '../../src/deploy/program-format.ts';
import { namedPipe } from '../helpers/commands.ts';
import { none, temporaryDirectory } from '../helpers/store.ts';

t.test('the #! line of a script gives its interpreter, and the rest as one argument', async (t) => {
  const path = join(temporaryDirectory(t), 'script');
  const descriptors = readdirSync('/proc/self/fd').length;
  const rows: [text: string, interpreter?: string, argument?: string][] = [
    ['#!/bin/sh\necho', '/bin/sh'],
    ['#!/bin/sh', '/bin/sh'],
    ['#! \t/usr/bin/env  -S node\t--flag \nx', '/usr/bin/env', '-S node\t--flag'],
    ['#!/bin/sh\r\n', '/bin/sh\r'],
    ['#!/bin/sh\0\x01\x02', '/bin/sh'],
    [`#!/${'x'.repeat(300)}\n`, `/${'x'.repeat(253)}`],
    ['#!\n/bin/sh'],
    ['#! \t\n/bin/sh'],
    ['echo\n#!/bin/sh\n'],
    [' #!/bin/sh\n'],
    [''],
  ];
  for (const [text, interpreter, argument = ''] of rows) {
    writeFileSync(path, text);
    const expected = interpreter === undefined ? undefined : { interpreter, argument };
    t.strictSame(firstLineIn(beginningOf(path) ?? none()), expected, JSON.stringify(text));
  }
  t.equal(beginningOf(`${path}-missing`), undefined);
  t.equal(readdirSync('/proc/self/fd').length, descriptors);
});

t.test('a file that its owner keeps from being read is not waited for', async (t) => {
  // In a process of its own, which can be ended while it waits.
  const source = import.meta.resolve('../../src/deploy/program-format.ts');
  const program = `
    const { beginningOf } = await import('${source}');
    console.log(beginningOf('${namedPipe(t)}')?.length);`;
  const words = ['--input-type=module', '--eval', program];
  const options = { encoding: 'utf8', timeout: 10_000, killSignal: 'SIGKILL' } as const;
  t.equal(execFileSync(process.execPath, words, options), '4096\n');
});

t.test('the loader of a program is the one that the kernel would start', async (t) => {
  const beginning = beginningOf('/bin/true');
  const loader = beginning && loaderIn(beginning);
  t.match(loader, /^\/lib.*\/ld-/);
  t.ok(existsSync(loader ?? ''));
  t.equal(loaderIn(Buffer.from('#!/bin/sh\n'.padEnd(64))), undefined);
});

t.test('a damaged or foreign header names no loader', async (t) => {
  const whole = readFileSync('/bin/true').subarray(0, 4096);
  for (const [at, byte] of [
    [32, 0xff],
    [39, 0xff],
    [54, 0xff],
    [57, 0xff],
    [4, 1],
    [4, 0],
  ] as const) {
    const damaged = Buffer.from(whole);
    damaged[at] = byte;
    t.doesNotThrow(() => loaderIn(damaged), `${byte} at ${at}`);
  }
  t.equal(loaderIn(Buffer.alloc(4096, '\x7fELF')), undefined);
});
