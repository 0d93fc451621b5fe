"""Whether TorchServe's frontend can run here."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_OLDEST = 17


@functools.cache
def _java_version() -> int | None:
    home = os.environ.get("JAVA_HOME")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    java = f"{home}/bin/java" if home else shutil.which("java", path=path)
    if java is None:
        return None
    with contextlib.suppress(OSError):
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
        if match := re.search(r'version "(\d+)', done.stderr + done.stdout):
            return int(match.group(1))
    return None


def require_java() -> None:
    """Skip the test when TorchServe cannot run here."""
    version = _java_version()
    if version is None or version < _OLDEST:
        pytest.skip(f"TorchServe needs Java {_OLDEST} or newer (scripts/install brings one); found {version}")
