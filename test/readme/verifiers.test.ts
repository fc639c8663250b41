import { spawnSync } from 'node:child_process';
import { accessSync, constants, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import t from 'tap';
import { serviceSignature } from '../../src/deliver/sign.ts';
import { realEffects } from '../../src/effects.ts';
import { newSigningSecret } from '../../src/secrets.ts';
import { ifHas } from '../helpers/programs.ts';
import { readmeBlock } from '../helpers/readme.ts';
import { temporaryDirectory } from '../helpers/store.ts';

/* The verifying code of the README, taken out of it and run on what davit really signs. */

interface Delivery {
  secret: string;
  header: string;
  body: Buffer;
  tolerance?: number;
}

interface Vector {
  secret: string;
  body: string;
  header: string;
}
const { valid: vectors }: { valid: Vector[] } = JSON.parse(
  readFileSync(join(import.meta.dirname, '../vectors/signatures.json'), 'utf8'),
);

const NOW = Math.floor(realEffects.now() / 1000);
const SECRET = newSigningSecret(realEffects.randomBytes);
const NEW_SECRET = newSigningSecret(realEffects.randomBytes);
const OTHER_SECRET = newSigningSecret(realEffects.randomBytes);
const TEXT = '{"id":"evt_1","data":{"ref":"café 🚀"}}';
const BODY = Buffer.from(TEXT);
const HEADER = serviceSignature([SECRET], NOW, BODY);
const ROTATED = serviceSignature([NEW_SECRET, SECRET], NOW, BODY);
const [TIME = '', V1 = ''] = HEADER.split(',');
/** Neither text nor UTF-8. */
const BYTES = Buffer.from([0, 255, 254, 128, 10, 13]);
/** Where Go keeps what it compiled: the user of a container often has no home directory. */
const HOME = homeDirectory() ?? join(import.meta.dirname, '../../build/home');
/** The vectors are of one day, and a hundred years are enough from any other. */
const ANY_TIME_SECONDS = 3_000_000_000;

const ACCEPTED: Record<string, Delivery> = {
  'a delivery': { secret: SECRET, header: HEADER, body: BODY },
  'one with other schemes': { secret: SECRET, header: `v0=abc,${HEADER},v2=a=b`, body: BODY },
  'one with two v1, by the new secret': { secret: NEW_SECRET, header: ROTATED, body: BODY },
  'one with two v1, by the secret that was rotated': { secret: SECRET, header: ROTATED, body: BODY },
  'one with a v1 that is of another length': { secret: SECRET, header: `${TIME},v1=00,${V1}`, body: BODY },
  'one of 200 s ago': { secret: SECRET, header: signedAt(NOW - 200), body: BODY },
  'one of a clock that is 200 s ahead': { secret: SECRET, header: signedAt(NOW + 200), body: BODY },
  'an empty body': { secret: SECRET, header: signed(Buffer.alloc(0)), body: Buffer.alloc(0) },
  'bytes that are no text': { secret: SECRET, header: signed(BYTES), body: BYTES },
  ...Object.fromEntries(
    vectors.map(({ secret, header, body }, index) => [
      `vector ${index}`,
      { secret, header, body: Buffer.from(body), tolerance: ANY_TIME_SECONDS },
    ]),
  ),
};

const REFUSED: Record<string, Delivery> = {
  'another secret': { secret: OTHER_SECRET, header: HEADER, body: BODY },
  'the secret without its prefix': { secret: SECRET.slice('whsec_'.length), header: HEADER, body: BODY },
  'two v1 of other secrets': { secret: OTHER_SECRET, header: ROTATED, body: BODY },
  'a body with one more byte': { secret: SECRET, header: HEADER, body: Buffer.from(`${TEXT}\n`) },
  'a body that was parsed and written again': {
    secret: SECRET,
    header: HEADER,
    body: Buffer.from(JSON.stringify(JSON.parse(TEXT), null, 1)),
  },
  'bytes that were taken for text': {
    secret: SECRET,
    header: signed(BYTES),
    body: Buffer.from(BYTES.toString()),
  },
  'one of 400 s ago': { secret: SECRET, header: signedAt(NOW - 400), body: BODY },
  'one of a clock that is 400 s ahead': { secret: SECRET, header: signedAt(NOW + 400), body: BODY },
  'an old one under a new time': { secret: SECRET, header: `t=${NOW},${signedAt(NOW - 9)}`, body: BODY },
  'another time': { secret: SECRET, header: `t=${NOW - 1},${V1}`, body: BODY },
  'no header': { secret: SECRET, header: '', body: BODY },
  'no time': { secret: SECRET, header: V1, body: BODY },
  'no signature': { secret: SECRET, header: TIME, body: BODY },
  'an empty signature': { secret: SECRET, header: `${TIME},v1=`, body: BODY },
  'half a signature': { secret: SECRET, header: HEADER.slice(0, -32), body: BODY },
  'another scheme': { secret: SECRET, header: HEADER.replace('v1=', 'v0='), body: BODY },
  'a time with a line break': { secret: SECRET, header: HEADER.replace(',', '\n,'), body: BODY },
  'a time that is none': { secret: SECRET, header: `t=NaN,${V1}`, body: BODY },
  'a time beyond all numbers': { secret: SECRET, header: `t=${'9'.repeat(400)},${V1}`, body: BODY },
  'what is not ASCII': { secret: SECRET, header: `${TIME},v1=é🚀`, body: BODY },
  'an empty secret': { secret: '', header: serviceSignature([''], NOW, BODY), body: BODY },
};

interface Language {
  /** What the machine needs to have. */
  program: string;
  /** The README's block, and the file that it is written to. */
  block: string;
  path: string;
  /** Reads the deliveries from stdin as JSON, and prints what the README's code says of each. */
  driver: { path: string; code: string };
  /** Beside them. */
  files?: Record<string, string>;
  command: [string, ...string[]];
}

const LANGUAGES: Record<string, Language> = {
  Node: {
    program: 'node',
    block: 'verify.mjs',
    path: 'verify.mjs',
    driver: {
      path: 'driver.mjs',
      code: `
        import { readFileSync } from 'node:fs';
        import { verify } from './verify.mjs';
        const verdicts = JSON.parse(readFileSync(0, 'utf8')).map(({ secret, header, body, tolerance }) =>
          verify(secret, header, Buffer.from(body, 'base64'), tolerance));
        console.log(JSON.stringify(verdicts));`,
    },
    command: [process.execPath, 'driver.mjs'],
  },
  Python: {
    program: 'python3',
    block: 'verify.py',
    path: 'verify.py',
    driver: {
      path: 'driver.py',
      code: `
import base64, json, sys
from verify import verify
def verdict(d):
    arguments = [d["secret"], d["header"], base64.b64decode(d["body"])]
    return verify(*arguments, d["tolerance"]) if "tolerance" in d else verify(*arguments)
print(json.dumps([verdict(d) for d in json.load(sys.stdin)]))`,
    },
    command: ['python3', '-B', 'driver.py'],
  },
  Go: {
    program: 'go',
    block: 'verify.go',
    path: 'webhooks/verify.go',
    driver: {
      path: 'main.go',
      code: `
package main

import (
	"encoding/json"
	"os"
	"time"

	"example.com/receiver/webhooks"
)

func main() {
	var deliveries []struct {
		Secret, Header string
		Body           []byte
		Tolerance      *int
	}
	if err := json.NewDecoder(os.Stdin).Decode(&deliveries); err != nil {
		panic(err)
	}
	verdicts := []bool{}
	for _, d := range deliveries {
		tolerance := 300 * time.Second
		if d.Tolerance != nil {
			tolerance = time.Duration(*d.Tolerance) * time.Second
		}
		verdicts = append(verdicts, webhooks.Verify(d.Secret, d.Header, d.Body, tolerance))
	}
	if err := json.NewEncoder(os.Stdout).Encode(verdicts); err != nil {
		panic(err)
	}
}`,
    },
    files: { 'go.mod': 'module example.com/receiver\n\ngo 1.19\n' },
    command: ['go', 'run', '.'],
  },
  PHP: {
    program: 'php',
    block: 'verify.php',
    path: 'verify.php',
    driver: {
      path: 'driver.php',
      code: `<?php
require 'verify.php';
function verdict(array $d): bool
{
    $arguments = [$d['secret'], $d['header'], base64_decode($d['body'])];
    return isset($d['tolerance']) ? verify(...$arguments, ...[$d['tolerance']]) : verify(...$arguments);
}
echo json_encode(array_map('verdict', json_decode(file_get_contents('php://stdin'), true)));`,
    },
    command: ['php', 'driver.php'],
  },
  Ruby: {
    program: 'ruby',
    block: 'verify.rb',
    path: 'verify.rb',
    driver: {
      path: 'driver.rb',
      code: `
require "base64"
require "json"
require_relative "verify"
puts JSON.generate(JSON.parse($stdin.read).map { |d|
  options = d.key?("tolerance") ? { tolerance_seconds: d["tolerance"] } : {}
  verify(d["secret"], d["header"], Base64.decode64(d["body"]), **options)
})`,
    },
    command: ['ruby', 'driver.rb'],
  },
};

for (const [name, language] of Object.entries(LANGUAGES)) {
  t.test(`the README's ${name} accepts only what davit sent`, ifHas(language.program), async (t) => {
    t.strictSame(verdicts(temporaryDirectory(t), language, ACCEPTED), every(ACCEPTED, true));
    t.strictSame(verdicts(temporaryDirectory(t), language, REFUSED), every(REFUSED, false));
  });
}

t.test("the README's Ruby refuses a header that is not UTF-8", ifHas('ruby'), (t) => {
  const directory = temporaryDirectory(t);
  writeFileSync(join(directory, 'verify.rb'), readmeBlock('verify.rb'));
  const code = `require "./verify"; p verify("whsec_a", "t=1,v1=\\xff", ""), verify("whsec_a", "t=\\xff,v1=a", "")`;
  const { stdout, stderr } = spawnSync('ruby', ['-e', code], { cwd: directory, encoding: 'utf8' });
  t.equal(stdout, 'false\nfalse\n', stderr);
  t.end();
});

/** By the name of each delivery, what this language says of it. */
function verdicts(
  directory: string,
  { block, path, driver, files = {}, command: [file, ...words] }: Language,
  deliveries: Record<string, Delivery>,
): Record<string, unknown> {
  const all = { ...files, [path]: readmeBlock(block), [driver.path]: driver.code };
  for (const [path, text] of Object.entries(all)) {
    mkdirSync(dirname(join(directory, path)), { recursive: true });
    writeFileSync(join(directory, path), text);
  }
  const input = Object.values(deliveries).map(({ body, ...rest }) => ({
    ...rest,
    body: body.toString('base64'),
  }));
  const { status, stdout, stderr } = spawnSync(file, words, {
    cwd: directory,
    env: { ...process.env, HOME },
    input: JSON.stringify(input),
    encoding: 'utf8',
  });
  if (status !== 0 || stderr !== '') throw new Error(`${file} exited with ${status}: ${stderr}`);
  const said: unknown[] = JSON.parse(stdout);
  return Object.fromEntries(Object.keys(deliveries).map((name, index) => [name, said[index]]));
}

/** Undefined unless this user can work there. */
function homeDirectory(): string | undefined {
  const { HOME } = process.env;
  try {
    accessSync(HOME ?? '', constants.W_OK);
    return HOME;
  } catch {
    return undefined;
  }
}

function every(deliveries: Record<string, Delivery>, verdict: boolean): Record<string, boolean> {
  return Object.fromEntries(Object.keys(deliveries).map((name) => [name, verdict]));
}

function signed(body: Buffer): string {
  return serviceSignature([SECRET], NOW, body);
}

function signedAt(seconds: number): string {
  return serviceSignature([SECRET], seconds, BODY);
}
