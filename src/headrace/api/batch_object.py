"""A job as OpenAI's batch object."""

import sqlite3
from typing import Any

from headrace.api.batch_results import result_ids
from headrace.offline.jobs.errors import JobError
from headrace.offline.jobs.folder import JobFolder
from headrace.offline.jobs.spec import JobSpec, JobState

_STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def batch_object(folder: JobFolder, predicted: float | None) -> dict[str, Any]:
    """The object, by the job's last commit; reads its journal.

    Args:
        folder: of the job.
        predicted: when it is expected to end, as far as a server knows that now.

    Raises:
        JobError: that is damaged.
    """
    journal = folder.journal()
    try:
        return describe(journal.spec, journal.state, journal.cancel_wanted, predicted)
    except sqlite3.Error as error:
        raise JobError(f"the journal of {folder.id} cannot be read: {error}") from error
    finally:
        journal.close()


def describe(spec: JobSpec, state: JobState, cancel_wanted: bool, predicted: float | None) -> dict[str, Any]:
    """The object; what is ours beyond OpenAI's is `predicted_finish_at` and `meets_window`."""
    status = "cancelling" if cancel_wanted and not state.final else state.status
    failures = None
    if state.status == "failed":
        failure = {"code": "invalid_input_file", "message": state.reason, "param": "input_file_id", "line": None}
        failures = {"object": "list", "data": [failure]}
    output, errors = result_ids(spec.id)
    expires = spec.expires_at
    if predicted is None or state.final:
        predicted = state.predicted_end  # by the last attempt
    return {
        "id": spec.id,
        "object": "batch",
        "endpoint": spec.endpoint,
        "model": spec.model,
        "errors": failures,
        "input_file_id": spec.input_file,
        "completion_window": spec.completion_window,
        "status": status,
        "output_file_id": output if state.final and state.output_bytes else None,
        "error_file_id": errors if state.final and state.error_bytes else None,
        "created_at": int(spec.created_at),
        "expires_at": None if expires is None else int(expires),
        **{f"{name}_at": _seconds(state.times.get(name)) for name in _STAMPS},
        "request_counts": {"total": state.total, "completed": state.completed, "failed": state.failed},
        "usage": {
            "input_tokens": state.prompt_tokens,
            "input_tokens_details": {"cached_tokens": state.cached_tokens},
            "output_tokens": state.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": state.prompt_tokens + state.output_tokens,
        },
        "metadata": spec.metadata,
        "predicted_finish_at": _seconds(predicted),
        "meets_window": None if predicted is None or expires is None else predicted <= expires,
    }


def _seconds(time: float | None) -> int | None:
    return None if time is None else int(time)
