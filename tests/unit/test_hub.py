"""A hub id is found in the cache of this machine, at the revision asked for, and fetched only when that is allowed."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from ts_pippy_handler.config import load_config
from ts_pippy_handler.errors import ConfigError

REVISIONS = {"1" * 40: "main", "2" * 40: "v2"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as huggingface_hub lays it out: snapshots of links to files that are stored under other names."""
    from huggingface_hub import constants

    root = tmp_path / "hub"
    model = root / "models--org--tiny"
    for folder in ("blobs", "refs", "snapshots"):
        (model / folder).mkdir(parents=True)
    for commit, ref in REVISIONS.items():
        (model / "refs" / ref).write_text(commit)
        snapshot = model / "snapshots" / commit
        snapshot.mkdir()
        (model / "blobs" / commit).write_text("{}")
        (snapshot / "config.json").symlink_to(os.path.relpath(model / "blobs" / commit, snapshot))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return model / "snapshots"


def located(**handler: object) -> Path:
    return Path(load_config({"handler": {"model_path": "org/tiny", **handler}}).handler.model_path)


@pytest.mark.parametrize("download", [False, True], ids=["cache only", "offline"])
@pytest.mark.parametrize(
    ("revision", "commit"), [(None, "1" * 40), ("main", "1" * 40), ("v2", "2" * 40), ("2" * 40, "2" * 40)]
)
def test_a_revision_is_found_without_a_network(cache: Path, revision: str | None, commit: str, download: bool) -> None:
    assert located(revision=revision, download=download) == cache / commit


def test_the_settings_of_a_found_model_can_be_read_again(cache: Path) -> None:
    config = load_config({"handler": {"model_path": "org/tiny", "revision": "v2"}})
    assert load_config(config.model_dump(exclude_none=True)) == config


def test_an_archive_may_name_a_hub_id(cache: Path, tmp_path: Path) -> None:
    mapping = {"handler": {"model_path": "org/tiny"}}
    assert load_config(mapping, model_dir=str(tmp_path)).handler.model_path == str(cache / ("1" * 40))
    own = tmp_path / "org" / "tiny"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    assert load_config(mapping, model_dir=str(tmp_path)).handler.model_path == str(own), "a directory goes first"


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (
            {"revision": "v3"},
            r"not a directory, and org/tiny at revision 'v3' is not in the hub's cache .*; give the path",
        ),
        ({"model_path": "org/other"}, r"not a directory, and org/other is not in .* or set handler\.download: true"),
        (
            {"model_path": "org/other", "download": True},
            r"org/other cannot be fetched, .*; HF_HUB_OFFLINE is set: unset",
        ),
    ],
)
def test_what_is_not_there_is_said_at_once(cache: Path, handler: dict[str, object], message: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^handler\.model_path: {message}"):
        located(**handler)
    assert time.monotonic() - started < 5


def test_a_revision_of_a_directory(tmp_path: Path) -> None:
    message = f"handler.revision: 'v2' is for a model named by its id, but handler.model_path is {str(tmp_path)!r}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        located(model_path=str(tmp_path), revision="v2")
