"""Builds the simulated device with plain g++, once for each torch version and each state of the sources.

Knows nothing of what the library does. The result lies in a private cache directory, which may be deleted
at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCE_DIR = Path(__file__).resolve().parent
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-Wno-interference-size")
COMPILE_TIMEOUT_S = 900


class SimdevUnavailable(RuntimeError):
    """The simulated device cannot be built here; the message says why."""


def cache_dir() -> Path:
    """Return the private directory for built libraries, made if needed.

    Raises:
        SimdevUnavailable: If it cannot be made, or if others could put a library of theirs into it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    path = (Path(base) if base else Path.home() / ".cache") / "omni_offload_simdev"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise SimdevUnavailable(f"no cache directory: {error}; set XDG_CACHE_HOME") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SimdevUnavailable(f"{path} belongs to another user or others may write to it; set XDG_CACHE_HOME")
    return path


def library() -> Path:
    """Return the path of the library for this torch, built if need be (about half a minute).

    Processes that build at the same time wait for the first one.

    Raises:
        SimdevUnavailable: If there is no compiler or it fails.
    """
    compiler = _compiler()
    target = cache_dir() / f"libsimdev-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    with _locked(target.parent / "build.lock"):
        if not target.exists():
            _compile(compiler, target)
    return target


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise SimdevUnavailable(f"no C++ compiler: {name!r} is not on the PATH; install g++ or set CXX")
    return found


def _fingerprint(compiler: str) -> str:
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SimdevUnavailable(f"the C++ compiler does not run: {error}") from error
    digest = hashlib.sha256("\0".join((torch.__version__, version, *FLAGS)).encode())
    for source in [*_sources(), *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, target: Path) -> None:
    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # One translation unit: nearly all of the time goes into torch's headers, which are then read only
        # once.
        unity = Path(scratch) / "unity.cpp"
        unity.write_text("".join(f'#include "{source}"\n' for source in _sources()))
        output = Path(scratch) / target.name
        command = [
            compiler,
            *FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{SOURCE_DIR}",
            f"-I{include}",
            f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
            str(unity),
            "-o",
            str(output),
            f"-L{lib}",
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{lib}",
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SimdevUnavailable(f"the C++ compiler failed: {error}") from error
        if result.returncode != 0:
            raise SimdevUnavailable(f"the C++ compiler failed:\n{result.stderr[-4000:]}")
        os.replace(output, target)
