"""What is known about a tier while it is read: how fast it is, and whether it works. Pure; time is an argument."""

#: Before anything was read: latency of an attempt, seconds, and its rate, bytes per second.
PRIOR_SECONDS = 0.005
PRIOR_RATE = 200e6

#: Share of the newest attempt in the average: a tier whose rate drops is known to be slow after a handful of reads.
NEWEST = 0.2

#: Errors in a row after which a tier is left alone, and for how long: doubled each time, up to a limit.
FAILURES = 3
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 60.0


class TierSpeed:
    """Seconds that an attempt takes, as an exponentially weighted average over the attempts of a tier.

    An attempt is measured from being given to the tier until its bytes are there, with whatever else the tier was
    doing meanwhile; so this is what the next attempt will take in company, not the tier's bandwidth by its inverse.
    """

    __slots__ = ("_bytes", "_seconds")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._bytes = 0.0

    @property
    def known(self) -> bool:
        """True once an attempt has been measured."""
        return self._bytes > 0

    def observe(self, nbytes: int, seconds: float) -> None:
        """An attempt took so long."""
        if not self._bytes:
            self._bytes, self._seconds = float(nbytes), seconds
            return
        self._bytes += NEWEST * (nbytes - self._bytes)
        self._seconds += NEWEST * (seconds - self._seconds)

    def expected(self, nbytes: int) -> float:
        """Seconds that an attempt at so many bytes takes."""
        if not self._bytes:
            return PRIOR_SECONDS + nbytes / PRIOR_RATE
        return nbytes * self._seconds / self._bytes


class TierHealth:
    """Whether a tier is worth asking: after some errors in a row it is left alone, longer each time.

    After a pause it is on probation: one attempt at a time until one succeeds; an error begins the next pause.
    """

    __slots__ = ("_failures", "_pause", "paused_until")

    def __init__(self) -> None:
        self._failures = 0
        self._pause = 0.0
        self.paused_until = float("-inf")

    def paused(self, now: float) -> bool:
        """True while the tier is left alone."""
        return now < self.paused_until

    @property
    def on_probation(self) -> bool:
        """True from the first pause to the next success."""
        return self._pause > 0

    def succeeded(self) -> None:
        """An attempt succeeded."""
        self._failures = 0
        self._pause = 0.0
        self.paused_until = float("-inf")

    def failed(self, now: float) -> bool:
        """An attempt failed.

        Returns:
            True when this begins a pause.
        """
        if self.paused(now):
            return False  # begun before the pause: nothing new
        self._failures += 1
        if self._failures < FAILURES and not self.on_probation:
            return False
        self._pause = min(self._pause * 2 or FIRST_PAUSE, LONGEST_PAUSE)
        self.paused_until = now + self._pause
        return True
