import t from 'tap';
import { printJson } from '../../src/cli/results.ts';

t.test('a list is printed as any JSON value, but item by item', async (t) => {
  const item = { id: 'dpl_1', message: 'line one\nline two', outputs: { a: '1' }, events: [], scopes: ['x'] };
  for (const value of [item, [], [item], [item, {}, 'text', [[1, 2], []], null], 'text', null]) {
    const printed = printedOf(value);
    t.equal(printed.join('\n'), JSON.stringify(value, null, 2));
    t.strictSame(JSON.parse(printed.join('\n')), value);
    t.equal(printed.length, Array.isArray(value) && value.length > 0 ? value.length + 2 : 1);
  }
  t.match(printedOf([{ message: '\x7f' }])[1], /"\\u007f"/);
});

/** The lines that are printed, as one text for each call. */
function printedOf(value: unknown): string[] {
  const printed: string[] = [];
  printJson({ terminal: { print: (text) => printed.push(text) } }, value);
  return printed;
}
