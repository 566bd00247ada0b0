"""What a store can be told beyond its layout and its tiers."""

from dataclasses import dataclass
from typing import Literal

from headrace.core.config import StoreConfig

Replication = Literal["auto", "all", "one", "none"]
ReadPolicy = Literal["completion", "static", "sequential"]


@dataclass(frozen=True)
class StoreSettings:
    """How a store behaves.

    Attributes:
        replication: which tiers a new chunk is saved to; `auto` leaves it to the reuse seen.
        read_policy: how tiers share the reads of a step.
        write_queue: bytes of parts that may wait to be written; more saves are dropped.
        ttl: seconds after which a part that was not used is forgotten; 0: never.
        lease_seconds: for how long a chunk counts as being computed by whoever leased it, unless the lease is renewed.
        deferred_writes: whether writes wait for a forward pass and for reads.
        idle_seconds: an engine that began no forward pass for this long is idle, and writes flow.
    """

    replication: Replication = "auto"
    read_policy: ReadPolicy = "completion"
    write_queue: int = 256 << 20
    ttl: float = 7 * 86400.0
    lease_seconds: float = 30.0
    deferred_writes: bool = True
    idle_seconds: float = 0.05

    @classmethod
    def of(cls, config: StoreConfig) -> "StoreSettings":
        """The settings that a configuration spells."""
        return cls(
            replication=config.replication,  # type: ignore[arg-type]  # choices were checked when it was read
            read_policy=config.read_policy,  # type: ignore[arg-type]
            write_queue=config.write_queue,
            ttl=config.store_ttl,
            deferred_writes=config.deferred_writes,
        )
