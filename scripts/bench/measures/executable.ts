import { statSync } from 'node:fs';
import { EXECUTABLE } from '../davit.ts';
import { type Measure, rowBelow } from '../measure.ts';

export const executable: Measure = {
  name: 'executable',
  title: 'the executable',
  run: async () => [rowBelow('build/davit', 'MB', [statSync(EXECUTABLE).size / 1e6], 116)],
};
