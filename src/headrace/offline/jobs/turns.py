"""Whose turn it is among jobs that share an engine, and when each of them will end. A policy."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from headrace.offline.jobs.urgency import CALM


@dataclass(slots=True)
class Turn:
    """A job that wants the engine.

    Attributes:
        id: of the job; decides between equals.
        due: when its window closes, seconds since the epoch; infinite: never.
        rest: seconds of engine time that it is expected to need still; None: not known.
    """

    id: str
    due: float
    rest: float | None


T = TypeVar("T", bound=Turn)


def in_turn(jobs: Iterable[T], running: T | None, now: float) -> list[T]:
    """The order in which jobs should run: the one that is due first before the others.

    The running one, though, goes on as long as that leaves none that is due before it short of time. Whoever is due
    first is never sent away, so jobs do not drive each other out in turns.

    Args:
        jobs: all that have not ended.
        running: the one of them that runs.
        now: seconds since the epoch.
    """
    by_due = sorted(jobs, key=lambda job: (job.due, job.id))
    if running is None:
        return by_due
    going_on = [running, *(job for job in by_due if job is not running)]
    ends = ends_of(going_on, now)
    for job in takewhile(lambda job: job is not running, by_due):
        if job.id in ends and ends[job.id] - now > CALM * (job.due - now):
            return by_due
    return going_on


def ends_of(order: Iterable[Turn], now: float) -> dict[str, float]:
    """When each job is expected to end, seconds since the epoch, one after another from now on.

    One whose rest is not known has no entry, and holds up nobody.
    """
    ends: dict[str, float] = {}
    for job in order:
        if job.rest is not None:
            now += job.rest
            ends[job.id] = now
    return ends
