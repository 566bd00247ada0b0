"""What can be wrong with a job, and with one line of its input."""

from headrace.core.errors import HeadraceError


class WrongFile(HeadraceError):
    """The input is no file of requests at all; nothing has been run."""


class JobError(HeadraceError):
    """A job cannot be made, found, or go on."""


class JobBusy(JobError):
    """Another process runs the job."""


class WrongLine(HeadraceError):
    """One line of the input cannot be a request; the others run.

    Args:
        code: OpenAI's `error.code`, e.g. `invalid_json_line`.
        message: what is wrong with it.
        param: the field that is wrong.
        custom_id: of the line, as far as it could be read.
    """

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.custom_id = custom_id


def reason_of(error: Exception) -> str:
    """What a failed call of the system or of SQLite says, with the file it is about where that is known."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)
