import { type Cidr, parseCidr } from '../../src/address.ts';

/** A block of addresses, such as `10.0.0.0/8`. */
export function cidr(text: string): Cidr {
  const parsed = parseCidr(text);
  if (!parsed.ok) throw new Error(`${text} ${parsed.reason}`);
  return parsed.cidr;
}
