import { execFile, spawn } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import type { Test } from 'tap';
import { type Contract, contractAt, fetchUnder, type RequestOptions } from './contract.ts';
import { executablePath } from './executable.ts';
import { listening, type Served } from './listening.ts';
import { temporaryDirectory } from './store.ts';

const execute = promisify(execFile);

/** The packaged executable on a file of its own, as a user runs it. */
export interface Place {
  directory: string;
  databasePath: string;
  /** `davit <words> --json`, parsed. Rejects with the exit code and stderr. */
  davit<Result = Record<string, string>>(...words: string[]): Promise<Result>;
  /** `davit serve`, once it listens; killed with the test, if it has not ended before. */
  serve(...options: string[]): Promise<RunningService>;
}

export interface RunningService extends Served {
  /** Rejects if the answer is not what the service's own description says. */
  request(method: string, path: string, options?: RequestOptions): Promise<ServiceResponse>;
}

export interface ServiceResponse {
  status: number;
  headers: Headers;
  text: string;
  json(): Record<string, never>;
}

export function place(t: Test): Place {
  const directory = temporaryDirectory(t);
  const databasePath = join(directory, 'davit.db');
  // One that is killed leaves the files of its commands in it.
  const env = { ...process.env, TMPDIR: temporaryDirectory(t) };

  return {
    directory,
    databasePath,
    async davit<Result>(...words: string[]) {
      const before = words.includes('--') ? words.indexOf('--') : words.length;
      const all = [...words.slice(0, before), '--json', '--db', databasePath, ...words.slice(before)];
      const { stdout } = await execute(executablePath(), all);
      return JSON.parse(stdout) as Result;
    },
    async serve(...options) {
      const words = [
        'serve',
        '--db',
        databasePath,
        '--listen',
        '127.0.0.1:0',
        '--log-level',
        'warn',
        ...options,
      ];
      const child = spawn(executablePath(), words, { env, stdio: ['ignore', 'pipe', 'inherit'] });
      const served = await listening(t, child);
      return {
        ...served,
        async request(...request) {
          const answer = await fetchUnder(() => contractOf(served.url), served.url, ...request);
          return { ...answer, json: () => JSON.parse(answer.text) };
        },
      };
    },
  };
}

function contractOf(url: string): Promise<Contract> {
  const contract = contracts.get(url) ?? contractAt(url);
  contracts.set(url, contract);
  return contract;
}

const contracts = new Map<string, Promise<Contract>>();
