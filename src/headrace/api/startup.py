"""Starting the engine, and telling the user how far it is."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.core.config import Config
from headrace.front.generator import Generator
from headrace.front.launch import launch_generator


class StartProgress:
    """Called with a phase and its share done, 0 to 1: a bar on a terminal, a line per phase elsewhere.

    Args:
        model: what is being loaded.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._phase = ""
        self._started = self._phase_started = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "StartProgress":
        """Begin to show."""
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(f"starting {self._model}", total=1.0)
        else:
            sys.stderr.write(f"headrace: starting {self._model}\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.stop()

    def ready(self) -> None:
        """Say how long it took."""
        self._enter("")
        sys.stderr.write(f"headrace: started in {time.perf_counter() - self._started:.1f} s\n")
        sys.stderr.flush()

    def __call__(self, phase: str, done: float) -> None:
        """Show how far a phase is."""
        if self._bar is not None:
            self._bar.update(self._task, description=phase, completed=done)
        if phase != self._phase:
            self._enter(phase)

    def _enter(self, phase: str) -> None:
        """Another phase begins: say what the one before took, and what comes."""
        now = time.perf_counter()
        if self._bar is None and self._phase:
            sys.stderr.write(f"headrace: {self._phase}: {now - self._phase_started:.1f} s\n")
            sys.stderr.flush()
        self._phase, self._phase_started = phase, now


async def start_engine(config: Config, progress: StartProgress) -> Generator:
    """The engine in a process of its own, and the front over it.

    Raises:
        HeadraceError: it cannot start, or its tokenizer or template cannot be read.
    """
    server = config.server
    return await launch_generator(
        config.engine,
        chat_template=Path(server.chat_template) if server.chat_template else None,
        generation_config=server.generation_config,
        progress=progress,
    )
