"""Whose fault a failure is: a line's, which is then answered as HTTP would have, or the machine's."""

import logging
import sqlite3

from headrace.core.errors import EngineDead, HeadraceError
from headrace.offline.jobs.endpoint import Answer, Endpoint

#: They end the attempt: any other line would fail as well, and a later attempt may not.
OF_THE_MACHINE = (EngineDead, OSError, sqlite3.Error)

log = logging.getLogger(__name__)


def refused(endpoint: Endpoint, error: Exception, request: str) -> Answer:
    """What a line is answered that could not be prepared or run; the log tells of what nobody foresaw.

    Args:
        endpoint: that failed.
        error: what it raised.
        request: id of the line's result.

    Raises:
        EngineDead: `error` itself, where it is not the line's.
        OSError: the same.
        sqlite3.Error: the same.
    """
    if isinstance(error, OF_THE_MACHINE):
        raise error
    if not isinstance(error, HeadraceError):
        log.error("a line of a batch failed", exc_info=error, extra={"request": request})
    return endpoint.refusal(error)
