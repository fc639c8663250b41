import { realEffects } from '../../src/effects.ts';
import { openForWriting } from '../../src/store/database.ts';

/** A davit file of so many megabytes. */
export function makeLarge(dbPath: string, megabytes: number): void {
  const database = openForWriting(dbPath, realEffects);
  database.pragma('synchronous = OFF');
  database.exec(`
    INSERT INTO projects (id, name, status, created_at, policy) VALUES ('prj_1', 'website', 'active', 1, 'queue');
    INSERT INTO deployments (id, project_id, ref, status, reported, trigger, created_at, finished_at)
    VALUES ('dpl_1', 'prj_1', 'main', 'succeeded', 0, 'api', 1, 1);
    WITH RECURSIVE piece (start) AS (SELECT 0 UNION ALL SELECT start + 10000 FROM piece WHERE start < ${megabytes}000000)
    INSERT INTO log_chunks (deployment_id, start, bytes) SELECT 'dpl_1', start, randomblob(10000) FROM piece`);
  database.close();
}
