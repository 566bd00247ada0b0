"""The exception tree. A message says what was wrong, with which value, and what to do."""


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""


class ConfigError(HeadraceError):
    """A flag, environment variable or configuration key is wrong."""


class ModelError(HeadraceError):
    """A model cannot be found, read or run; the message names the unsupported part."""


class InvalidRequest(HeadraceError):
    """A request is refused at the door; becomes OpenAI's 400 error object.

    Args:
        message: what was wrong and what to do.
        param: name of the offending request field, as OpenAI's `error.param`.
        code: OpenAI's `error.code`, e.g. `context_length_exceeded`.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(HeadraceError):
    """The engine takes no more requests for now; becomes a 429 with Retry-After."""


class EngineDead(HeadraceError):
    """The engine process ended or stopped answering; becomes a 503."""
