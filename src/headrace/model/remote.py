"""Models from the Hugging Face hub, kept in Hugging Face's own cache.

`huggingface_hub` is imported where it is used: it takes 0.2 s that a start with a local model need not pay.
"""

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelError
from headrace.model.progress import Progress, ProgressCallback

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
_WEIGHTS = ["*.safetensors"]
_SETTINGS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_UNWANTED = ["*/*.safetensors", "consolidated*", "original/*", "onnx/*"]


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """A model repository in Hugging Face's cache: its id, newest snapshot and size on disk."""

    name: str
    path: Path
    bytes: int


def snapshot(name: str, revision: str | None, progress: ProgressCallback | None, *, weights: bool = True) -> Path:
    """Fetch weights (safetensors only), configuration and tokenizer of a Hugging Face id; returns the folder.

    Honours `HF_HUB_OFFLINE`, `HF_HOME`, `HF_TOKEN`. Without a network a snapshot fetched earlier is used.

    Args:
        name: the id.
        revision: branch, tag or commit; None: the main branch.
        progress: told how many bytes have come.
        weights: False: everything but the weights.

    Raises:
        ModelError: no such id or revision, no permission, or no network and nothing in the cache.
    """
    if not _ID.fullmatch(name) or ".." in name:
        raise ModelError(f"{name!r} is not a folder here and cannot be a Hugging Face id (owner/name)")
    import huggingface_hub
    from huggingface_hub import errors

    started = time.monotonic()
    at = f"{name}@{revision}" if revision else name
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*_WEIGHTS, *_SETTINGS] if weights else _SETTINGS,
            ignore_patterns=_UNWANTED,
            tqdm_class=_bar(progress, started),
        )
    except errors.GatedRepoError as error:
        raise ModelError(f"{at} is gated: accept its terms on the hub, then log in with `hf auth login`") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"{at} does not exist on the Hugging Face hub, or needs a login") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{at} is not a folder here, not in the cache, and the Hugging Face hub cannot be reached; "
            "check the name, the network and HF_HUB_OFFLINE"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"fetching {at} failed: {first}") from error
    if progress is not None:
        progress(Progress("download", 1, 1, time.monotonic() - started, finished=True))
    return Path(folder)


def pickled(name: str, suffixes: tuple[str, ...]) -> list[str]:
    """Files of a repository with one of these suffixes; empty where the hub cannot be asked."""
    if not _ID.fullmatch(name):
        return []
    import huggingface_hub
    from huggingface_hub import errors

    try:
        files = huggingface_hub.snapshot_download(name, dry_run=True)
    except (errors.DryRunError, errors.HfHubHTTPError, OSError):
        return []  # the caller then says only that there is no safetensors file
    return sorted(file.filename for file in files if file.filename.endswith(suffixes))


def cached() -> list[CachedRepo]:
    """Repositories in the cache that hold safetensors weights and a config."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        found = huggingface_hub.scan_cache_dir()
    except CacheNotFound:
        return []
    repos = []
    for repo in sorted(found.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        names = {file.file_name for file in newest.files}
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            repos.append(CachedRepo(repo.repo_id, newest.snapshot_path, repo.size_on_disk))
    return repos


def remove(name: str) -> int:
    """Delete all revisions of a repository from the cache; returns the bytes freed.

    Goes by the repository's folder as the library's scan gives it: the library's own deletion goes by commit hash,
    which a repository shares with its duplicates.
    """
    import huggingface_hub

    freed = 0
    for repo in huggingface_hub.scan_cache_dir().repos:
        if repo.repo_type == "model" and repo.repo_id == name:
            shutil.rmtree(repo.repo_path)
            freed += int(repo.size_on_disk)
    return freed


def _bar(progress: ProgressCallback | None, started: float) -> Any:
    """A silent tqdm class that hands the bytes of a snapshot to `progress`."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._bytes = kwargs.get("unit") == "B"
            self._seen = 0
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self.total = kwargs.get("total") or 0

        def update(self, n: float | None = 1) -> bool | None:
            self._seen += int(n or 0)
            if progress is not None and self._bytes and self.total:
                progress(Progress("download", self._seen, int(self.total), time.monotonic() - started))
            return None

    return Bar
