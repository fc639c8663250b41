import { delay } from '../effects.ts';
import { messageOf } from '../errors.ts';
import { loadCLibrary } from '../libc.ts';
import type { CommandContext } from './command.ts';

const AF_UNIX = 1;
const SOCK_DGRAM = 2;
const SOCK_CLOEXEC = 0o2000000;
const MSG_DONTWAIT = 0x40;
const MSG_NOSIGNAL = 0x4000;

/** What an address holds, unix(7); a path also needs its final NUL. */
const NAME_MAX_BYTES = 108;

const RETRY_MS = 50;

export type SystemdState = 'READY=1' | 'STOPPING=1' | `EXTEND_TIMEOUT_USEC=${number}`;

/**
 * Returns a function that tells systemd the state of davit, if NOTIFY_SOCKET is set: sd_notify(3), Type=notify. Sends the
 * datagram itself, as systemd heeds only the main process of a unit. A newer state replaces one that waits for room. Never
 * throws; `warn` is told why systemd was not told.
 */
export function createNotifier(
  { environment, effects }: Pick<CommandContext, 'environment' | 'effects'>,
  warn: (text: string) => void,
): (state: SystemdState) => Promise<void> {
  const { NOTIFY_SOCKET } = environment;
  let newest: SystemdState | undefined;

  return async (state) => {
    if (NOTIFY_SOCKET === undefined || NOTIFY_SOCKET === '') return;
    newest = state;
    const failure = await tell(NOTIFY_SOCKET, state).catch(messageOf);
    if (failure !== undefined) warn(`systemd was not told ${state}: ${failure}`);
  };

  /** Returns why it failed. */
  async function tell(name: string, state: SystemdState): Promise<string | undefined> {
    const address = addressOf(name);
    if (address === undefined) return 'NOTIFY_SOCKET is not the address of a Unix socket';
    const send = await sender(address, Buffer.from(state));
    let failure = send();
    // Its queue is full. sd_notify(3) blocks then, which davit must not.
    while (failure === 'EAGAIN') {
      await delay(RETRY_MS, effects);
      if (newest !== state) return undefined; // which may have been sent already
      failure = send();
    }
    return failure;
  }
}

/** `struct sockaddr_un`; a name with @ is abstract, and begins with a NUL in its place. */
function addressOf(name: string): Buffer | undefined {
  const isPath = name.startsWith('/');
  if (!isPath && !name.startsWith('@')) return undefined;
  const bytes = Buffer.from(isPath ? `${name}\0` : name.replace('@', '\0'));
  if (bytes.length > NAME_MAX_BYTES) return undefined;
  return Buffer.concat([Buffer.from(Uint16Array.of(AF_UNIX).buffer), bytes]);
}

/** Returns a function that sends the message to this address, and returns the name of the error if it fails. */
async function sender(address: Buffer, message: Buffer): Promise<() => string | undefined> {
  const { declare, lastError } = await loadCLibrary();
  const socket = declare('int socket(int domain, int type, int protocol)');
  const sendto = declare(
    'long sendto(int socket, void *message, size_t length, int flags, void *address, uint32_t addressLength)',
  );
  const close = declare('int close(int descriptor)');
  return () => {
    const descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (descriptor < 0) return lastError();
    const flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    const sent = sendto(descriptor, message, message.length, flags, address, address.length);
    const failure = sent < 0 ? lastError() : undefined;
    close(descriptor);
    return failure;
  };
}
