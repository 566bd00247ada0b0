"""The batches that lie in a `HEADRACE_HOME`: those of servers, not the jobs of commands."""

import logging
from contextlib import suppress
from pathlib import Path

from headrace.api.errors import ApiError, disk_full
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import JobFolder, list_jobs

log = logging.getLogger("headrace.api")


class BatchFolders:
    """See above; calls block.

    Args:
        home: folder of all jobs.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._unreadable: set[str] = set()  # of which the log has told

    def get(self, batch_id: str) -> JobFolder:
        """One batch, of any server; `batch_id` is well formed.

        Raises:
            ApiError: 404, there is none.
        """
        folder = JobFolder(self._home / batch_id)
        found = folder.exists
        with suppress(JobError):  # one that cannot be read may be a server's; whoever reads it next tells
            found = found and folder.spec().origin == "server"
        if not found:
            raise ApiError(404, f"No batch found: {batch_id}", param="batch_id", code="batch_not_found")
        return folder

    def all(self) -> list[JobFolder]:
        """All batches, the newest first, but those whose journal is damaged (the log tells of each once)."""
        found: list[tuple[float, JobFolder]] = []
        for folder in list_jobs(self._home):
            try:
                spec = folder.spec()
            except JobError as error:
                if disk_full(error):
                    raise  # none can be read
                if folder.id not in self._unreadable:
                    self._unreadable.add(folder.id)
                    log.warning("a batch cannot be read", extra={"batch": folder.id, "reason": str(error)})
                continue
            if spec.origin == "server":
                found.append((spec.created_at, folder))
        return [folder for _, folder in sorted(found, key=lambda each: (-each[0], each[1].id))]
