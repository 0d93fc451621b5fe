"""C source travels with the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

from ts_pippy_handler import native_code

PACKAGE = Path(native_code.__file__).parent


def test_c_files_are_installed() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))
    installed = project["tool"]["setuptools"]["package-data"]["ts_pippy_handler"]
    assert sorted(path.name for path in PACKAGE.glob("*.c")) == sorted(
        name for name in installed if name.endswith(".c")
    )
