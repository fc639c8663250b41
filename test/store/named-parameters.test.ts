import Sqlite from 'better-sqlite3';
import t from 'tap';
import { bindByPosition } from '../../src/store/named-parameters.ts';

t.test(
  'each parameter takes the value of its name, however the object orders them and however often it occurs',
  async (t) => {
    const database = memory();
    const insert = database.prepare('INSERT INTO one (a, b, c) VALUES (:first, +:second, :first)');

    insert.run({ unknown: 'x', second: null, first: 'once' });

    t.strictSame(database.prepare('SELECT a, b, c FROM one').get(), { a: 'once', b: null, c: 'once' });
  },
);

t.test('what reads takes them, too, and still returns columns and rows', async (t) => {
  const database = memory();
  database.exec(`INSERT INTO one VALUES ('1', 'x', NULL), ('2', 'x', NULL)`);
  const sql = 'SELECT a FROM one WHERE b = +:b AND a >= +:from ORDER BY a';
  const input = { from: '1', b: 'x' };

  t.strictSame(database.prepare(sql).all(input), [{ a: '1' }, { a: '2' }]);
  t.equal(database.prepare(sql).pluck().get(input), '1');
  t.strictSame(database.prepare(sql).raw().all(input), [['1'], ['2']]);
  t.strictSame([...database.prepare(sql).pluck().iterate(input)], ['1', '2']);
});

t.test('parameters without a name are bound in their order', async (t) => {
  const database = memory();

  database.prepare('INSERT INTO one (a, b) VALUES (?, ?)').run('1', '2');

  t.strictSame(database.prepare('SELECT a, b FROM one').get(), { a: '1', b: '2' });
});

t.test('a statement without one of its parameters is refused, and writes nothing', async (t) => {
  const database = memory();
  const insert = database.prepare('INSERT INTO one (a, b) VALUES (:first, :second)');

  t.throws(() => insert.run({ first: '1' }), TypeError);

  t.equal(database.prepare('SELECT count(*) FROM one').pluck().get(), 0);
});

function memory(): Sqlite.Database {
  const database = new Sqlite(':memory:');
  database.exec('CREATE TABLE one (a TEXT, b TEXT, c TEXT)');
  bindByPosition(database);
  return database;
}
