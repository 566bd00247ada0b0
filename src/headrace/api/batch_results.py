"""The results of a batch as files: written where the files will lie, and made known when the batch ends."""

from pathlib import Path

from headrace.api.file_info import derived_id
from headrace.api.file_store import FileStore
from headrace.offline.jobs.spec import JobSpec, JobState

OUTPUT, ERRORS = "output", "errors"


def result_ids(job: str) -> tuple[str, str]:
    """Ids of the files that a job's output and errors are, or will be."""
    return derived_id(job, OUTPUT), derived_id(job, ERRORS)


def publish_results(files: FileStore, spec: JobSpec, last: JobState) -> None:
    """Make files of the results that are there; done again, it changes nothing.

    Args:
        files: where they lie.
        spec: of the job.
        last: its state, all results written.
    """
    output, errors = result_ids(spec.id)
    for file_id, what, path, size in (
        (output, OUTPUT, Path(spec.output), last.output_bytes),
        (errors, ERRORS, Path(spec.errors), last.error_bytes),
    ):
        if size and path.exists():
            files.publish(path, f"{spec.id}_{what}.jsonl", "batch_output", file_id, spec.kept_s)
