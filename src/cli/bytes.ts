const UNITS = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'] as const;

/** `231.9 MB`: units of a thousand, as disks are sold and `df -H` counts. */
export function formatBytes(bytes: number): string {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  const scaled = bytes / 1_000 ** power;
  return `${power === 0 ? scaled : scaled.toFixed(1)} ${UNITS[power] ?? 'B'}`;
}
