"""What a tier holds: the index, its limits, eviction and leases; owned by one process per tier, used by all."""
