"""The digest under which KV may be shared: weights, configuration, dtype and format."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from headrace.core.errors import ModelError
from headrace.core.paths import home

#: Raise it when the meaning of stored KV changes (layout of a head, rotary convention).
FORMAT_VERSION = 1

#: Configuration keys that name a file or a library version and change no number.
_NAMES_ONLY = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache",
                         "_attn_implementation", "attn_implementation", "experts_implementation"})  # fmt: skip


def weights_digest(files: list[Path]) -> str:
    """One hex digest over the bytes of the weight files, in the order of their names.

    Each file's digest is kept under `HEADRACE_HOME/digests`, valid while path, size, mtime and inode stay the same.
    """
    total = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        total.update(bytes.fromhex(file_digest(file)))
    return total.hexdigest()


def file_digest(file: Path) -> str:
    """sha256 of a file's bytes, from the cache where the file has not changed."""
    real = file.resolve()
    before = _identity(real)
    record = home() / "digests" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json"
    known = _read(record)
    if known is not None and known[0] == before:
        return known[1]
    with real.open("rb", buffering=0) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if _identity(real) != before:
        raise ModelError(f"{file} changed while it was read; load again when it is complete")
    _write(record, before, digest)
    return digest


def fingerprint(weights: str, config: dict[str, Any], dtype: str, rope: str) -> str:
    """The engine's fingerprint, 64 hex digits.

    Args:
        weights: `weights_digest` of the checkpoint.
        config: the model's configuration as a dictionary, overrides applied.
        dtype: type of the computation.
        rope: what `rope.freeze` decided for frequencies that depend on the longest sequence; empty: nothing.
    """
    kept = {key: value for key, value in config.items() if key not in _NAMES_ONLY}
    text = json.dumps(
        {"format": FORMAT_VERSION, "weights": weights, "config": kept, "dtype": dtype, "rope": rope},
        sort_keys=True,
        separators=(",", ":"),
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _identity(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _read(record: Path) -> tuple[list[int], str] | None:
    """A record that is missing or not whole is as good as none: the digest is computed again."""
    try:
        data = json.loads(record.read_bytes())
        identity, digest = [int(n) for n in data["identity"]], str(data["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (identity, digest) if len(digest) == 64 else None


def _write(record: Path, identity: list[int], digest: str) -> None:
    """Published whole by a rename, under a name of its own until then, so that two processes may write at once."""
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=record.parent, prefix=".digest-")
    except OSError:
        return  # A cache folder that cannot be written costs the next start a second of hashing, no more.
    with os.fdopen(handle, "w") as stream:
        json.dump({"identity": identity, "sha256": digest}, stream)
    os.replace(temporary, record)
