"""The global KV store: prefixes outlive the process and come back from several storage tiers at once.

Usable without an engine. Imports `core` only. The parts, from data to decision:

- `layout`, `part`, `keys`, `header`: what a chunk is, byte by byte (DESIGN 4).
- `tiers/`: where parts lie. A tier reads, writes, deletes and lists; it decides nothing.
- `catalog/`: which parts a tier holds, how full it is, what goes when it is full, who computes what right now.
- `read_pool` (policy) and `reader` (threads): all reads of a step as one pool that tiers draw from as they finish.
- `replication` (policy), `part_save`, `write_gate` and `writer` (threads): what is saved where, deferred, bounded,
  never ahead of reads.
- `store`: the front door, `KVStore`: look up, load, save, flush; `opening` makes one from the configuration.
- `maintenance`: list, verify, collect and purge what lies in tiers.
"""
