import { spawnSync } from 'node:child_process';
import { closeSync, openSync } from 'node:fs';
import t from 'tap';
import { serviceSignature } from '../../src/deliver/sign.ts';
import { realEffects } from '../../src/effects.ts';
import { MAIN, run, runHere } from '../helpers/cli.ts';
import { fakeEffects } from '../helpers/effects.ts';

const SECRET = 'whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=';
const OTHER_SECRET = SECRET.replace('AAE', 'AAA');
/** Not UTF-8, with line ends that reading as text would change. */
const BODY = Buffer.from([0xff, 0x00, 0x0d, 0x0a, 0x7b, 0x7d, 0xc3, 0x0a]);

const nowSeconds = () => Math.floor(realEffects.now() / 1_000);
const header = (atSeconds = nowSeconds()) => serviceSignature([SECRET], atSeconds, BODY);
const verify = (words: string[], env: Record<string, string> = {}, stdin: Uint8Array = BODY) =>
  run(['verify', ...words], { env, stdin });

t.test('a delivery with a valid signature is ok', async (t) => {
  const results = await Promise.all([
    verify(['--secret', SECRET, '--header', header()]),
    verify(['--secret', SECRET, '--header', `Service-Signature: ${header()}`]),
    verify(['--secret', SECRET, '--header', ` ${header()}\r\n`]),
    verify(['--secret', SECRET, '--header', ` Service-Signature: ${header()} `]),
    verify(['--header', header()], { DAVIT_SIGNING_SECRET: SECRET }),
  ]);
  for (const result of results) t.strictSame(result, { stdout: 'ok\n', stderr: '', exitCode: 0 });
});

t.test('an altered body, a wrong secret or a bad header is rejected', async (t) => {
  const altered = Buffer.concat([BODY, Buffer.from(' ')]);
  const results = await Promise.all([
    verify(['--secret', SECRET, '--header', header()], {}, altered),
    verify(['--secret', OTHER_SECRET, '--header', header()]),
    verify(['--secret', SECRET, '--header', 'nonsense']),
    verify(['--secret', '', '--header', header()]),
  ]);
  t.strictSame(
    results.map(({ stderr }) => stderr),
    [
      'error: no signature matches the secret and the body\n',
      'error: no signature matches the secret and the body\n',
      'error: the header has no t\n',
      'error: the secret is empty\n',
    ],
  );
  for (const { stdout, exitCode } of results) t.strictSame([stdout, exitCode], ['', 1]);
});

t.test('a wrong time is told apart from a wrong signature, with how far it is from now', async (t) => {
  const effects = fakeEffects();
  const of = (seconds: number) => {
    const words = ['--secret', SECRET, '--header', header(effects.now() / 1_000 + seconds)];
    return runHere(['verify', ...words], { stdin: BODY, effects });
  };
  const outside = 'error: the signature is right, but the timestamp is outside the tolerance';
  t.strictSame(await of(-310), { stdout: '', stderr: `${outside}: 5m10s before now\n`, exitCode: 1 });
  t.strictSame(await of(310), { stdout: '', stderr: `${outside}: 5m10s after now\n`, exitCode: 1 });
});

t.test(
  'what was probably copied wrong is said: the secret with its quotes, the body with a line end, the other header',
  async (t) => {
    const ending = (lineEnd: string) => Buffer.concat([BODY, Buffer.from(lineEnd)]);
    const of = async (secret: string, body?: Buffer, atSeconds = nowSeconds()) =>
      (await verify(['--secret', secret, '--header', header(atSeconds)], {}, body)).stderr;
    const secretIsWrong =
      'error: no signature matches the secret and the body: the secret is not as davit shows it, whsec_ and 44 characters\n';
    t.equal(await of(`"${SECRET}"`), secretIsWrong);
    t.equal(await of(SECRET.replace('whsec_', '')), secretIsWrong);
    t.equal(await of(`${SECRET}\n`), secretIsWrong);
    const lineEndIsWrong =
      'error: no signature matches the secret and the body: but one does without the line end after the body\n';
    for (const lineEnd of ['\n', '\r\n']) t.equal(await of(SECRET, ending(lineEnd)), lineEndIsWrong);
    t.equal(await of(SECRET, ending('\n'), nowSeconds() - 3_600), lineEndIsWrong, 'also of an old delivery');
    const other = 'v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=';
    for (const copied of [`webhook-signature: ${other}`, other]) {
      t.match(await verify(['--secret', SECRET, '--header', copied]), {
        stderr: 'error: the header has no t: Service-Signature is meant, not webhook-signature\n',
      });
    }
    t.equal(await of(OTHER_SECRET, ending('\n')), 'error: no signature matches the secret and the body\n');
  },
);

t.test('an empty or unreadable stdin is an error, unless an empty body was signed', async (t) => {
  const words = ['verify', '--secret', SECRET, '--header', header()];
  const stderr = 'error: stdin is empty: give the body there, as in < body\n';
  t.strictSame(await run(words, { stdin: '' }), { stdout: '', stderr, exitCode: 1 });
  const directory = openSync('/', 'r');
  t.match(
    spawnSync(process.execPath, [MAIN, ...words], { stdio: [directory, 'pipe', 'pipe'], encoding: 'utf8' }),
    { status: 1, stdout: '', stderr },
  );
  closeSync(directory);
  const signed = serviceSignature([SECRET], nowSeconds(), Buffer.alloc(0));
  t.match(await verify(['--secret', SECRET, '--header', signed], {}, Buffer.alloc(0)), { stdout: 'ok\n' });
});

t.test('the tolerance is a number of seconds or a duration', async (t) => {
  const old = ['--secret', SECRET, '--header', header(nowSeconds() - 3_000)];
  const results = await Promise.all([
    verify([...old, '--tolerance', '3600']),
    verify([...old, '--tolerance', '1h']),
    verify([...old, '--tolerance', '10m']),
    verify([...old, '--tolerance', '3153600000']),
    verify([...old, '--tolerance', 'ten']),
    verify([...old, '--tolerance', '99999999999']),
  ]);
  t.strictSame(
    results.map(({ exitCode }) => exitCode),
    [0, 0, 1, 0, 2, 2],
  );
  t.match(results.at(-1)?.stderr, /a number of seconds, or a duration such as 5m, and at most 36500d/);
});

t.test('--json prints the result', async (t) => {
  const good = await verify(['--secret', SECRET, '--header', header(), '--json']);
  t.strictSame([JSON.parse(good.stdout), good.exitCode], [{ ok: true }, 0]);
  const bad = await verify(['--secret', SECRET, '--header', 'x', '--json']);
  t.match(JSON.parse(bad.stdout), { ok: false, reason: /header/ });
  t.strictSame([bad.stderr, bad.exitCode], ['', 1]);
});
