"""A server of our own as a child process, for a conversation or a measurement."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from headrace.core.config import Config
from headrace.core.errors import HeadraceError
from headrace.core.settings import ENV_OTHERS, ENV_PREFIX, to_flags

STOP_AFTER_S = 20.0


class ServerFailed(HeadraceError):
    """The server ended, or did not become ready in time."""


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(config: Config, timeout: float = 900.0) -> Iterator[str]:
    """Start `headrace serve` with this configuration; yields its address once it is ready, stops it at the end.

    The child has a session of its own, so that Ctrl-C reaches only us, and sees none of our `HEADRACE_*` settings:
    they are in `config` already.

    Raises:
        ServerFailed: it ended or did not answer within `timeout` seconds; the message ends with its last words.
    """
    url = f"http://{config.server.host}:{config.server.port}"
    command = [sys.executable, "-m", "headrace.cli", "serve", *to_flags(config)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX) or k in ENV_OTHERS}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
        try:
            _wait_until_ready(process, url, timeout, log.fileno())
            yield url
        finally:
            _stop(process)


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, timeout: float, log: int) -> None:
    deadline = time.monotonic() + timeout
    with httpx.Client(base_url=url, trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            try:
                if client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            try:
                process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            raise ServerFailed(f"the server ended with code {process.returncode}: {_last_words(log)}")
    raise ServerFailed(f"the server was not ready after {timeout:.0f} s: {_last_words(log)}")


def _last_words(log: int) -> str:
    size = os.fstat(log).st_size
    text = os.pread(log, 4096, max(0, size - 4096)).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_AFTER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
