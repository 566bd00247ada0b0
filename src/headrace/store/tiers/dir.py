"""The `dir` tier: a folder on any mounted file system."""

from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.store.tiers.files import FileTier
from headrace.store.tiers.folder import TierFolder
from headrace.store.tiers.tier import Scope

_FOLDER = "headrace-kv"


class DirTier(FileTier):
    """Parts in `path/headrace-kv`, past the page cache where the file system can do that.

    Args:
        path: made if it is not there; nothing but `headrace-kv` in it is touched.
        capacity: bytes it may hold.
        scope: `cluster` when other nodes mount the same folder.
        depth: reads in flight that keep it busy.
        name: by default `dir:<path>`.

    Raises:
        ConfigError: the folder cannot be made or written, or belongs to another user.
    """

    def __init__(
        self, path: Path, capacity: int, scope: Scope = "node", depth: int = 4, name: str | None = None
    ) -> None:
        path = path.expanduser().absolute()
        try:
            path.mkdir(0o700, parents=True, exist_ok=True)
            folder = TierFolder(path, (_FOLDER,))
            direct = folder.takes_direct()
        except OSError as error:
            raise ConfigError(f"cannot write to folder {path}: {error.strerror}; give another path") from error
        super().__init__(name or f"dir:{path}", folder, capacity, scope, depth, direct=direct, forget=True)
