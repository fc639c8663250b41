import t from 'tap';
import {
  type Shorten,
  shortEvents,
  shortList,
  shortName,
  shortRef,
  shortSentence,
  shortStatus,
  shortUrl,
} from '../../src/cli/shorten.ts';

const URL = 'https://hooks.example.com:8443/teams/a/deployments?token=1234567';

const CASES: [of: string, shorten: Shorten, text: string, width: number, shown: string][] = [
  ['what fits is shown whole', shortName, 'website', 7, 'website'],
  ['a name loses its end', shortName, 'website-of-everybody', 12, 'website-of-…'],
  ['but not all of it', shortName, 'website-of-everybody', 0, 'website…'],
  ['a reason keeps more', shortSentence, 'the running one of its project', 0, 'the running one…'],
  ['a ref keeps its end', shortRef, 'release/2026-11-27', 11, 'relea…11-27'],
  ['also at its smallest', shortRef, 'release/2026-11-27', 0, 'rele…-27'],
  ['a URL keeps its host and end', shortUrl, URL, 40, 'https://hooks.example.com:8443…n=1234567'],
  ['in any case', shortUrl, URL, 0, 'https://hooks.example.com:8443…=1234567'],
  [
    'and as much of its end as there is room for',
    shortUrl,
    URL,
    45,
    'https://hooks.example.com:8443…?token=1234567',
  ],
  [
    'a URL of a host alone is shown whole',
    shortUrl,
    'https://hooks.example.com/',
    0,
    'https://hooks.example.com/',
  ],
  ['the number in the queue stays', shortStatus, 'queued, number 12', 0, 'queued #12'],
  ['so does an exit code', shortStatus, 'failed: exit code 255', 0, 'failed: exit 255'],
  ['a long reason is cut', shortStatus, 'failed: report timeout', 0, 'failed: report …'],
  ['events lose what all begin with', shortEvents, 'deployment.succeeded', 19, 'succeeded'],
  ['a list of them too', shortEvents, 'deployment.failed deployment.created', 14, 'failed created'],
  [
    'a list says how many more there are',
    shortList(' '),
    'logs:read webhooks:read projects:read',
    27,
    'logs:read webhooks:read +1',
  ],
  [
    'of its first one nothing is cut',
    shortList(' '),
    'deployments:write logs:read webhooks:write',
    0,
    'deployments:write +2',
  ],
  ['names may hold blanks', shortList(', '), 'my site, our site, api', 0, 'my site +2'],
  ['nor of an only one', shortList(' '), 'deployments:write', 0, 'deployments:write'],
  [
    'but of one that is longer than any scope',
    shortList(', '),
    `${'the site of our customer '.repeat(3)}, api`,
    20,
    'the site of our custome… +1',
  ],
  [
    'what a reader takes for one character is not cut',
    shortName,
    `${'🇩🇪'.repeat(3)}👩‍👩‍👧‍👦é`,
    8,
    `${'🇩🇪'.repeat(3)}…`,
  ],
  ['nor at the end', shortRef, `${'é'.repeat(6)}/👩‍👩‍👧‍👦é`, 0, 'éééé…👩‍👩‍👧‍👦é'],
  ['wide characters count as two columns', shortRef, '日本語日本語', 9, '日本…本語'],
];

for (const [of, shorten, text, width, shown] of CASES) {
  t.test(`${of}: ${text} in ${width} columns`, async (t) => {
    t.equal(shorten(text, width), shown);
  });
}
