import { Format, Match } from 'tcompare';

/*
 * Loaded into every test process (`node-arg` of tap's configuration). In tap, `t.match` lets a list be longer than its
 * pattern, and an empty pattern matches any list: what should not be in an answer could be. Here lists must be as long
 * as their patterns; fields that a pattern does not name are ignored, as in tap.
 */

const items = Object.getOwnPropertyDescriptor(Format.prototype, 'objectAsArray');
if (items === undefined) {
  throw new Error('tcompare reads lists in another way than it did: see test/helpers/exact-lists.ts');
}
Object.defineProperty(Match.prototype, 'objectAsArray', items);
