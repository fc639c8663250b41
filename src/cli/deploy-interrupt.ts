import { type DeploymentId, isTerminal, type TerminalStatus } from '../domain.ts';
import { delay } from '../effects.ts';
import type { ApiClient } from './api-client.ts';
import { type CommandContext, countingOnce, EXIT_CODE_OF_SIGNAL } from './command.ts';
import { isYes } from './confirm.ts';
import { problemText } from './error-text.ts';

/** How far a cancellation is; `wanted`: it is requested once the deployment is created. */
type Cancellation = 'wanted' | 'requested' | 'accepted' | 'refused';

/** SIGHUP comes when a runner or a connection hangs up. */
type EndSignal = 'SIGINT' | 'SIGTERM' | 'SIGHUP';

/** What these signals do to `davit deploy`, and how far that is. */
export interface Interruption {
  /** To be called before and after each try to create the deployment. */
  tried(mayBeCreated: boolean): void;
  /** To be called when the deployment is created: cancels it if a signal has asked for that. */
  created(id: DeploymentId): void;
  /** To be called as soon as the end is known: there is nothing to cancel any more, and a signal exits by the status. */
  ended(status: TerminalStatus): void;
  isCanceling(): boolean;
  /** Whether the answer of the service to the cancellation is awaited. */
  isOpen(): boolean;
  /** Resolves when no question is on the screen. */
  answered(): Promise<void>;
  /** Resolves when no cancellation is under way: until then, closing the client would cut it off. */
  settled(): Promise<void>;
  mayBeCreated(): boolean;
  /** What becomes of the deployment when davit ends now, and how to find it. */
  whatIsLeft(): string;
}

/** How often it is looked whether the deployment has ended while the question is on the screen. */
const LOOK_EVERY_MS = 1_000;

/**
 * Handles SIGINT, SIGTERM and SIGHUP: the first may cancel the deployment, or asks; the second leaves at once, but for a
 * SIGHUP while a cancellation is under way.
 */
export function handleInterruption(
  api: ApiClient,
  idempotencyKey: string,
  { cancelOnInterrupt = false, wait = false }: { cancelOnInterrupt?: boolean; wait?: boolean },
  { terminal, effects, onSignal, exit }: CommandContext,
): Interruption {
  let id: DeploymentId | undefined;
  let mayBeCreated = false;
  let ended: TerminalStatus | undefined;
  let signals = 0;
  let lastSignal: EndSignal = 'SIGINT';
  let cancellation: Cancellation | undefined;
  let question: Promise<void> | undefined;
  const asking = new AbortController();
  let request: Promise<void> | undefined;

  const interrupt = (signal: EndSignal) => {
    signals += 1;
    lastSignal = signal;
    if (ended !== undefined) leave(signal);
    else if (signals === 1 && cancelOnInterrupt && mayBeCreated) cancel();
    else if (signals === 1 && signal === 'SIGINT' && wait && id !== undefined) question = ask(id);
    // A shell passes it on when its terminal hangs up, and again when it ends: nobody means to leave.
    else if (signal === 'SIGHUP' && cancellation !== undefined && cancellation !== 'refused') return;
    else leave(signal);
  };
  const listen = () => onSignal(['SIGINT', 'SIGTERM', 'SIGHUP'], countingOnce(interrupt, effects));
  let stopListening = listen();

  return {
    tried(may) {
      mayBeCreated = may;
      // Another try would create what is to be canceled.
      if (cancellation !== undefined && !may) leave(lastSignal);
    },
    created(createdId) {
      id = createdId;
      if (cancellation === 'wanted') request = requestCancel(createdId);
    },
    ended: end,
    isCanceling: () => cancellation !== undefined,
    isOpen: () => cancellation === 'requested',
    answered: async () => question,
    settled: async () => request,
    mayBeCreated: () => mayBeCreated,
    whatIsLeft,
  };

  function end(status: TerminalStatus): void {
    ended = status;
    asking.abort();
  }

  async function ask(askedId: DeploymentId): Promise<void> {
    void watch(askedId);
    const answer = await terminal.ask(`Cancel deployment ${askedId}? [y/N] `, asking.signal);
    asking.abort();
    // A ^C after the answer is another one, however soon it comes. One that comes just now would be lost between
    // listeners, as the SIGHUP of a terminal that hangs up, whose end of input is the answer.
    const stopListeningBefore = stopListening;
    stopListening = listen();
    stopListeningBefore();
    if (answer === null) leave('SIGINT');
    else if (ended !== undefined) return;
    else if (isYes(answer)) cancel();
    else terminal.note('the deployment goes on; ^C again stops following it');
  }

  /** Ends the question with the deployment: the log, which would tell the end, waits for the answer. */
  async function watch(askedId: DeploymentId): Promise<void> {
    for (;;) {
      await delay(LOOK_EVERY_MS, effects);
      if (asking.signal.aborted) return;
      const seen = await api.deployment(askedId);
      if (seen === null) return; // the key may not see it
      if (seen !== undefined && isTerminal(seen.status)) return end(seen.status);
    }
  }

  function cancel(): void {
    cancellation = 'wanted';
    if (id === undefined)
      terminal.note(
        'the deployment is canceled as soon as it is created; a further ^C or SIGTERM leaves at once',
      );
    else request = requestCancel(id);
  }

  async function requestCancel(canceledId: DeploymentId): Promise<void> {
    terminal.note(`canceling deployment ${canceledId}; a further ^C or SIGTERM leaves at once`);
    cancellation = 'requested';
    try {
      const answer = await api.call({ method: 'POST', path: `/v2/deployments/${canceledId}/cancel` });
      // 409: it had just ended.
      if (answer.ok || answer.status === 409) cancellation = 'accepted';
      else refuse(answer.message);
    } catch (error) {
      // Nobody waits for this to whom it could be thrown.
      refuse(problemText(error));
    }
  }

  function refuse(why: string): void {
    cancellation = 'refused';
    terminal.note(`it cannot be canceled: ${why}`);
  }

  function leave(signal: EndSignal): void {
    terminal.note(`left; ${ended === undefined ? whatIsLeft() : `deployment ${id}: ${ended}`}`);
    if (ended === undefined) exit(EXIT_CODE_OF_SIGNAL[signal]);
    else exit(ended === 'succeeded' ? 0 : 1);
  }

  function whatIsLeft(): string {
    if (!mayBeCreated) return 'this created no deployment';
    if (id === undefined) {
      const state = cancellation === 'wanted' ? ', and is not canceled' : '';
      return `the deployment may have been created${state}: repeat with --idempotency-key ${idempotencyKey} to get its id`;
    }
    if (cancellation === 'requested')
      return `the cancellation of deployment ${id} was requested, without an answer so far`;
    if (cancellation === 'accepted') return `the cancellation of deployment ${id} was requested`;
    return `deployment ${id} goes on`;
  }
}
