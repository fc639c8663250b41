/** Inserts an entry as the newest, and removes the oldest beyond `max`: a Map iterates in insertion order. */
export function putLatest<Key, Value>(map: Map<Key, Value>, key: Key, value: Value, max: number): void {
  map.delete(key);
  map.set(key, value);
  for (const oldest of map.keys()) {
    if (map.size <= max) return;
    map.delete(oldest);
  }
}
