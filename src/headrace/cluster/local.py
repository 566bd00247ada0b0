"""The local launcher: an engine as a child process of the front."""

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from headrace.cluster.client import STOP_SECONDS, Progress, WorkerClient
from headrace.cluster.places import ANYWHERE, Place
from headrace.core.config import EngineConfig
from headrace.core.errors import EngineDead
from headrace.engine.environment import worker_environment

IDENTITY = b"worker-0"


class LocalEngine(WorkerClient):
    """The client of an engine process that this process started, and ends."""

    _process: asyncio.subprocess.Process
    _folder: Path
    _watcher: "asyncio.Task[None]"

    async def spawn(self, address: str, folder: Path, place: Place) -> None:
        """Start the worker process and watch it."""
        self._folder = folder
        cpus = [",".join(map(str, place.cpus))] if place.cpus else []
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace.cluster.worker",
            address,
            self._identity.decode(),
            str(os.getpid()),
            *cpus,
            env=worker_environment(self._config.model.threads or len(place.cpus), place.device),
            stdin=asyncio.subprocess.DEVNULL,
        )
        self._watcher = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def hung(self, error: EngineDead) -> None:
        """See `WorkerClient.hung`: a step that does not end heeds no message."""
        super().hung(error)
        self._process.kill()

    async def close(self) -> None:
        """End the worker: ask, then insist; one that is still loading has nothing to write, and heeds no message."""
        loading = self._info is None
        await super().close()
        if loading and self._process.returncode is None:
            self._process.kill()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self) -> None:
        status = await self._process.wait()
        cause = f"signal {-status}" if status < 0 else f"status {status}"
        self.lost(EngineDead(f"the engine process ended with {cause}"))


async def launch(
    config: EngineConfig, progress: Progress | None = None, place: Place = ANYWHERE, sharers: int = 1
) -> LocalEngine:
    """Start an engine process and wait until it is ready.

    The socket is a Unix one in a folder that only this user can enter.

    Args:
        config: of the engine.
        progress: told how far loading is.
        place: cores and accelerator.
        sharers: engines that are about to be started on this host, this one counted; they share its free memory.

    Raises:
        HeadraceError: the engine cannot start, with its reason.
    """
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    address = f"ipc://{folder}/engine"
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(address)
    client = LocalEngine(socket, IDENTITY, config, sharers)
    try:
        await client.spawn(address, folder, place)
        await client.start(progress)
    except BaseException:
        await client.close()
        raise
    return client
