"""The batches that have not ended: which one runs next, and when each will be done."""

from dataclasses import dataclass

from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.spec import JobState
from headrace.offline.jobs.turns import Turn, ends_of, in_turn


@dataclass(slots=True)
class Waiting(Turn):
    """A batch that has not ended.

    Attributes:
        folder: of the job.
        served: it is of the model that runs here; one of another model is only ended, by a request or by its window.
        not_before: on the loop's clock, when to try it again; 0 while it has never failed.
    """

    folder: JobFolder
    served: bool = True
    not_before: float = 0.0


def rest_of(state: JobState) -> float | None:
    """Seconds that a job which does not run is expected to need still; None: not known."""
    return None if state.predicted_s is None else max(0.0, state.predicted_s - state.seconds)


class BatchQueue:
    """See above; plain data, of one thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self.running: Waiting | None = None

    def __len__(self) -> int:
        """How many are of the model that runs here."""
        return sum(each.served for each in self._waiting.values())

    def add(self, batch: Waiting) -> None:
        """A batch has come."""
        self._waiting[batch.id] = batch

    def remove(self, job: str) -> None:
        """One has ended."""
        self._waiting.pop(job, None)

    @property
    def idle(self) -> list[Waiting]:
        """Those that do not run."""
        return [each for each in self._waiting.values() if each is not self.running]

    def next(self, loop_time: float) -> Waiting | None:
        """The one to run; None where none may be tried yet."""
        ready = [each for each in self._waiting.values() if each.served and each.not_before <= loop_time]
        return min(ready, key=lambda each: (each.due, each.id), default=None)

    def next_try(self) -> float | None:
        """On the loop's clock, when one may be tried again; None where there is none."""
        return min((each.not_before for each in self._waiting.values() if each.served), default=None)

    def gives_way(self, now: float) -> bool:
        """Whether the running one should let another go first; one that could not run before drives nobody out."""
        running = self.running
        if running is None:
            return False
        fresh = [each for each in self.idle if each.served and not each.not_before]
        return in_turn([running, *fresh], running, now)[0] is not running

    def ends(self, now: float, coming: Waiting | None = None) -> dict[str, float]:
        """When each is expected to end, seconds since the epoch, as far as that is known.

        Args:
            now: seconds since the epoch.
            coming: one that is not in the queue yet.
        """
        batches = [each for each in self._waiting.values() if each.served]
        if coming is not None:
            batches.append(coming)
        return ends_of(in_turn(batches, self.running, now), now)
