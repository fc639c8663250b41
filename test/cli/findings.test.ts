import t from 'tap';
import { findingsText, note, ok, problem } from '../../src/cli/findings.ts';

t.test('what to do about findings is not wrapped, as commands in it are copied', async (t) => {
  const check =
    'sudo -u davit davit admin project check prj_VcBFNLeo5Ba9ZwpyHjsn9i5s --db /var/lib/davit/davit.db';
  const revoke =
    'replace it if somebody still needs it: davit admin key create; if not, davit admin key revoke key_1';
  const findings = [
    note('user', 'checked as root, and the service runs as davit, who may have other rights', check),
    ok('limits', 'fine'),
    problem('keys', 'k1 expired', revoke),
    problem('keys', 'k2 expired', revoke),
  ];
  for (const columns of [40, 80, null]) {
    const [table = '', advice] = findingsText(findings, { columns, colours: false }).split('\n\n');
    t.equal(advice, `what to do\nuser  ${check}\nkeys  ${revoke}`);
    for (const line of table.split('\n')) t.ok(line.length <= (columns ?? 100), line);
  }
});
