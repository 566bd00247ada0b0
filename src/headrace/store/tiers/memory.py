"""The `memory` tier: files in shared memory, which every process of the node reads."""

import os
import shutil
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.settings import format_size
from headrace.store.part import PartId
from headrace.store.tiers.files import FileTier
from headrace.store.tiers.folder import TierFolder
from headrace.store.tiers.handover import HandoverReader, HandoverWriter
from headrace.store.tiers.os_errors import tier_error

SHARED_MEMORY = Path("/dev/shm")


class MemoryTier(FileTier):
    """Parts in `/dev/shm/headrace-<user>/<store>`; they outlive the process, not the machine.

    Args:
        name: the tier's name.
        capacity: bytes it may hold.
        store: which store it belongs to; processes that name the same one share it.
        depth: reads in flight that keep it busy.
        root: where shared memory is mounted.

    Raises:
        ConfigError: there is no shared memory, or less of it than `capacity`.
    """

    def __init__(self, name: str, capacity: int, store: str, depth: int = 2, root: Path = SHARED_MEMORY) -> None:
        if not root.is_dir():
            raise ConfigError(f"there is no shared memory at {root}; leave the memory tier out")
        folder = TierFolder(root, (f"headrace-{os.geteuid()}", store))
        super().__init__(name, folder, capacity, "node", depth, direct=False, forget=False)
        held = sum(found.st_blocks * 512 for _, found in folder.parts())
        free = os.statvfs(root)
        room = free.f_bavail * free.f_frsize + held
        if capacity > room:
            raise ConfigError(
                f"tier {name}: {format_size(capacity)} is more than the {format_size(room)} that {root} has free; "
                f"give less, or enlarge it (Docker: --shm-size)"
            )

    def open_handover(self, part: PartId, nbytes: int, record_bytes: int, token: str) -> HandoverWriter:
        """Begin to write a part that one reader may read layer by layer before it is sealed.

        Args:
            part: what is written.
            nbytes: its size.
            record_bytes: bytes of each layer's record.
            token: a secret that writer and reader share, such as a request's id; who has it may read.

        Raises:
            TierFull: no room.
            TierError: it cannot be begun, or this token's hand-over of the part is open already.
        """
        return HandoverWriter(self.name, self._files, part, nbytes, record_bytes, token)

    def attach(self, part: PartId, token: str) -> HandoverReader:
        """Join a hand-over that is open.

        Raises:
            PartMissing: there is none: it was never opened, or is sealed (then `read` it) or aborted.
            TierError: somebody has joined it already.
        """
        return HandoverReader(self.name, self._files, part, token)

    def remove_all(self) -> None:
        """Delete every part and the folder. Nobody else may be using the store.

        Raises:
            TierError: something is still there.
        """
        try:
            shutil.rmtree(self.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise tier_error(self.name, "removing it", error) from error
