import { once } from 'node:events';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { MessageChannel } from 'node:worker_threads';
import t, { type Test } from 'tap';
import { AppError } from '../../src/errors.ts';
import type { Change } from '../../src/store/changes.ts';
import type { GroupCommit, QueuedWrite } from '../../src/store/group-commit.ts';
import { connectWriter, serveWriter } from '../../src/store/writer-port.ts';

t.test('what awaits a write runs before what the listeners of its change put off', async (t) => {
  const { writer, queued, commit } = door(t);
  const heard: string[] = [];
  writer.onCommit((changes) => queueMicrotask(() => heard.push(...changes)));
  const asked = writer.write('instance.probe', undefined).then(() => heard.push('the answer'));
  const [write] = await queued(1);
  commit('queue');
  write?.settle({ ok: true, value: undefined });
  await asked;
  await nextTurn();
  t.strictSame(heard, ['the answer', 'queue']);
});

t.test('a port announces only the changes that concern its listeners, and no empty set', async (t) => {
  const { writer, queued, commit } = door(t);
  const heard: Change[][] = [];
  writer.onCommit((changes) => heard.push([...changes]));
  for (const changes of [['outbox'], ['outbox', 'queue']] as const) {
    const answer = writer.write('instance.probe', undefined);
    commit(...changes);
    (await queued(1))[0]?.settle({ ok: true, value: undefined });
    await answer;
  }
  t.strictSame(heard, [['queue']]);
});

t.test('sixteen writes are sent at once, and the rest before the close', async (t) => {
  const sent: { kind: string; writes?: unknown[] }[] = [];
  const writer = connectWriter({
    on: () => undefined as never,
    postMessage: (message) => void sent.push(message),
  });
  for (let count = 0; count < 20; count++) void writer.write('instance.probe', undefined);
  t.match(sent, [{ kind: 'writes', writes: { length: 16 } }]);
  void writer.close();
  t.strictSame(
    sent.map(({ kind, writes }) => [kind, writes?.length]),
    [
      ['writes', 16],
      ['writes', 4],
      ['close', undefined],
    ],
  );
  await nextTurn();
  t.equal(sent.length, 3);
});

t.test('a write that is answered during a close is answered before the close is', async (t) => {
  const { writer, queued } = door(t, async () => write?.settle({ ok: true, value: undefined }));
  const order: string[] = [];
  const asked = writer.write('instance.probe', undefined).then(() => order.push('answered'));
  const [write] = await queued(1);
  await writer.close().then(() => order.push('closed'));
  await asked;
  t.strictSame(order, ['answered', 'closed']);
});

t.test('errors cross the port whole, and the writes of a low-priority port have low priority', async (t) => {
  for (const lowPriority of [false, true]) {
    const { writer, queued } = door(t, undefined, lowPriority);
    const refusal = new AppError('invalid_request', 'no', {
      details: [{ in: 'body', field: 'ref', reason: 'required' }],
      retryAfterSeconds: 7,
    });
    const bug = new TypeError('oh');
    for (const error of [refusal, bug]) {
      const answer = writer.write('instance.probe', undefined).catch((caught: unknown) => caught);
      const [write] = await queued(1);
      t.equal(write?.lowPriority, lowPriority);
      write?.settle({ ok: false, error });
      const caught = await answer;
      t.match(caught, { message: error.message });
      if (error === bug) t.equal(Object(caught).stack, bug.stack);
      else t.match(caught, { code: 'invalid_request', details: refusal.details, retryAfterSeconds: 7 });
    }
  }
});

/** A writer behind a real port; the test decides what is committed and what is answered. */
function door(t: Test, onClose: () => Promise<void> = async () => undefined, lowPriority = false) {
  const { port1, port2 } = new MessageChannel();
  t.teardown(() => port1.close());
  const writes: QueuedWrite[] = [];
  const listeners: ((changes: ReadonlySet<Change>) => void)[] = [];
  const group: GroupCommit = {
    enqueue: (write) => void writes.push(write),
    onCommit: (listener) => void listeners.push(listener),
    pollOtherProcesses: () => undefined,
    close: () => undefined,
  };
  serveWriter(group, port1, { concerns: (change) => change !== 'outbox', lowPriority }, () => onClose());
  return {
    writer: connectWriter(port2),
    commit(...changes: Change[]) {
      for (const listener of listeners) listener(new Set(changes));
    },
    /** The writes that have arrived, once there are so many. */
    async queued(count: number): Promise<QueuedWrite[]> {
      while (writes.length < count) await once(port1, 'message');
      return writes.splice(0);
    },
  };
}
