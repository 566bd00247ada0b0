"""Who computes which chunk right now.

A lease ends when its holder releases it, when its deadline passes, or when the process of its holder is gone. It says
nothing about what is stored. Plain data; time is an argument.
"""

from collections.abc import Sequence

#: Leases at once; more are refused, which costs a computation done twice and nothing else.
MAX_LEASES = 1 << 18


class Leases:
    """Chunk key -> holder and deadline."""

    def __init__(self, limit: int = MAX_LEASES) -> None:
        self._limit = limit
        self._held: dict[bytes, tuple[str, float]] = {}
        self._by_holder: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, keys: Sequence[bytes], holder: str, deadline: float, now: float) -> int:
        """Lease keys, in order, until the deadline; stops at the first that somebody else holds.

        Returns:
            How many, from the first, the holder has now.
        """
        if len(self._held) + len(keys) > self._limit:
            self.expire(now)
        for i, key in enumerate(keys):
            if self.holder(key, now) not in (None, holder):
                return i
            if key not in self._held and len(self._held) >= self._limit:
                return i
            self._forget(key)
            self._held[key] = (holder, deadline)
            self._by_holder.setdefault(holder, set()).add(key)
        return len(keys)

    def release(self, keys: Sequence[bytes], holder: str) -> None:
        """End the leases on these keys that are the holder's."""
        for key in keys:
            held = self._held.get(key)
            if held is not None and held[0] == holder:
                self._forget(key)

    def release_all(self, holder: str) -> None:
        """End all leases of a holder."""
        for key in self._by_holder.pop(holder, set()):
            del self._held[key]

    def holds(self, holder: str) -> bool:
        """True while the holder has a lease that nobody forgot yet."""
        return holder in self._by_holder

    def holder(self, key: bytes, now: float) -> str | None:
        """Who holds a key; None when nobody does."""
        held = self._held.get(key)
        return held[0] if held is not None and held[1] > now else None

    def expire(self, now: float) -> None:
        """Forget leases past their deadline. Only memory depends on it: `holder` looks at deadlines itself."""
        for key in [key for key, (_, deadline) in self._held.items() if deadline <= now]:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            keys = self._by_holder[held[0]]
            keys.discard(key)
            if not keys:
                del self._by_holder[held[0]]
