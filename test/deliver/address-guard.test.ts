import { syncBuiltinESMExports } from 'node:module';
import os from 'node:os';
import t, { type Test } from 'tap';
import { createAddressGuard, type GuardOptions } from '../../src/deliver/address-guard.ts';
import { realEffects } from '../../src/effects.ts';

// Public addresses, as all others are refused anyway.
const ADDRESS = '93.184.216.34';
const OTHER_ADDRESS = '93.184.216.35';

t.test('of this machine, only the address and port where davit listens are refused', (t) => {
  const isRefused = guard({
    refusedAddresses: [{ host: ADDRESS, port: 443 }],
    machineAddresses: () => [ADDRESS, OTHER_ADDRESS],
  });
  t.ok(isRefused(ADDRESS, 443));
  t.notOk(isRefused(ADDRESS, 8443));
  t.notOk(isRefused(OTHER_ADDRESS, 443));
  t.end();
});

t.test('where davit listens on all addresses, those of all interfaces are refused', (t) => {
  haveInterfaces(t, { eth0: [ADDRESS], wlan0: [], eth1: [OTHER_ADDRESS, '2606:4700:4700::1111'] });
  const isRefused = guard({ refusedAddresses: [{ host: '0.0.0.0', port: 443 }] });
  t.ok(isRefused(ADDRESS, 443));
  t.ok(isRefused(OTHER_ADDRESS, 443));
  t.ok(isRefused('2606:4700:4700::1111', 443));
  t.notOk(isRefused('93.184.216.36', 443));
  t.end();
});

function guard(options: Partial<GuardOptions>): (address: string, port: number) => boolean {
  const { literalRefusal } = createAddressGuard(
    { allowedCidrs: [], timeoutMs: 1_000, ...options },
    realEffects,
  );
  return (address, port) => literalRefusal(address, port) !== null;
}

function haveInterfaces(t: Test, interfaces: Record<string, string[]>): void {
  const list = Object.entries(interfaces).map(([name, addresses]) => [
    name,
    addresses.map((address) => ({ address })),
  ]);
  t.teardown(syncBuiltinESMExports); // once that is as it was
  t.intercept(os, 'networkInterfaces', { value: () => Object.fromEntries(list) });
  syncBuiltinESMExports();
}
