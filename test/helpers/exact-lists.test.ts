import t from 'tap';

t.test('a list matches only a pattern of its length', async (t) => {
  t.match([{ id: 1, name: 'a' }, { id: 2 }], [{ id: 1 }, { id: 2 }]);
  t.notMatch([1, 2], [1]);
  t.notMatch([1], [1, 2]);
  t.notMatch([1], []);
  t.notMatch({ data: [1] }, { data: [] });
});
