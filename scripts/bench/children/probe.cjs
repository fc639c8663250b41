/*
 * Loaded into the packaged davit by NODE_OPTIONS. Once the service has started, it makes the process as large as
 * BENCH_RESIDENT_BYTES; at SIGUSR2 it writes to BENCH_PROBE_FILE for how long the event loop was held up since the last
 * time.
 */
const { renameSync, writeFileSync } = require('node:fs');
const { monitorEventLoopDelay } = require('node:perf_hooks');
const { isMainThread } = require('node:worker_threads');

if (isMainThread) {
  const delays = monitorEventLoopDelay({ resolution: 1 });
  delays.enable();
  setTimeout(() => {
    const missingBytes = Number(process.env.BENCH_RESIDENT_BYTES) - process.memoryUsage.rss();
    globalThis.benchBallast = Buffer.alloc(Math.max(0, missingBytes), 1);
  }, 500).unref();
  process.on('SIGUSR2', () => {
    const loop = { p99Ms: delays.percentile(99) / 1e6, residentMb: process.memoryUsage.rss() / 1e6 };
    writeFileSync(`${process.env.BENCH_PROBE_FILE}.new`, JSON.stringify(loop));
    renameSync(`${process.env.BENCH_PROBE_FILE}.new`, process.env.BENCH_PROBE_FILE);
    delays.reset();
  });
}
