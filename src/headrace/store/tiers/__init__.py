"""Storage tiers: one module per kind, all behind `tier.Tier`; `spec` makes them from `--tier` texts."""
