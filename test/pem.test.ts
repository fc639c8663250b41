import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { connect } from 'node:tls';
import t from 'tap';
import { readAuthorities } from '../src/pem.ts';
import { CA_PEM, startReceiver, tlsFixture } from './helpers/receiver.ts';
import { temporaryDirectory } from './helpers/store.ts';

const CA = CA_PEM.trimEnd();
const OTHER = tlsFixture('self-signed.pem').trimEnd();

t.test('a file of authorities is accepted if OpenSSL finds all of them in it, and only then', async (t) => {
  const path = join(temporaryDirectory(t), 'ca.pem');
  const { port } = await startReceiver(t, { tls: 'localhost' });
  const texts: [pem: string, accepted: boolean][] = [
    [`${OTHER}\n${CA}`, true],
    [`${OTHER}\r\n${CA}\r\n`, true],
    [`${OTHER} \t\n${CA}  \n`, true],
    [`\ufeff${OTHER}\n\ufeff${CA}\n`, true],
    [`a note\n${OTHER}\nand another\n${CA}\n`, true],
    [`${OTHER}${CA}\n`, false],
    [`${OTHER}\n  ${CA}\n`, false],
    [`${OTHER}\nca: ${CA}\n`, false],
    [`${OTHER}\n${CA} # ours\n`, false],
  ];
  for (const [pem, accepted] of texts) {
    t.equal(await isTrusted(port, pem), accepted, pem);
    writeFileSync(path, pem);
    if (accepted) t.equal(readAuthorities('--ca-file', path), pem);
    else {
      t.throws(() => readAuthorities('--ca-file', path), {
        code: 'invalid_request',
        message:
          /^--ca-file: .*ca\.pem: .*-----BEGIN.* and .*-----END.* must each stand on a line of their own$/,
      });
    }
  }
});

/** Whether a client that trusts these authorities trusts the server. */
function isTrusted(port: number, ca: string): Promise<boolean> {
  return new Promise((resolve) => {
    const socket = connect({ port, host: '127.0.0.1', servername: 'localhost', ca }, () => {
      socket.destroy();
      resolve(true);
    });
    socket.on('error', () => resolve(false));
  });
}
