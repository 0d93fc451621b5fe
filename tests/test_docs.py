"""What the documents and examples say is true: their configurations parse, their names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import ts_pippy_handler
from ts_pippy_handler.config import HandlerConfig, PippyConfig, load_config

ROOT = Path(__file__).parents[1]
YAMLS = sorted([ROOT / "model-config.yaml", *ROOT.glob("examples/**/model-config*.yaml")])


def parsed(config: dict[str, Any], model: Path) -> Any:
    (model / "config.json").write_text("{}")
    handler = dict(config["handler"])
    for key in ("model_path", "model_name"):
        if key in handler:
            handler[key] = str(model)
    return load_config({**config, "handler": handler})


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_parses(path: Path, tmp_path: Path) -> None:
    parsed(yaml.safe_load(path.read_text("utf-8")), tmp_path)


def test_the_reference_configuration_shows_every_key_with_its_default(tmp_path: Path) -> None:
    text = (ROOT / "model-config.yaml").read_text("utf-8")
    for model in (PippyConfig, HandlerConfig):
        for key in model.model_fields:
            assert re.search(rf"^\s*#?\s*{key}:", text, re.MULTILINE), f"model-config.yaml does not show {key}"
    settings = parsed(yaml.safe_load(text), tmp_path)
    for key, field in PippyConfig.model_fields.items():
        assert getattr(settings.pippy, key) == field.get_default(call_default_factory=True), key


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert versions[0] == ts_pippy_handler.__version__


DOCS = ("architecture", "multi_node", "performance", "reliability")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *(f"docs/{name}.md" for name in DOCS)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    for link in links:
        assert ((ROOT / document).parent / link).exists(), f"{document} links to {link}"
    for name in re.findall(r"`(\w+\.py)`", text):
        assert any(ROOT.glob(f"**/{name}")) or name == "pippy_handler.py", f"{document} names {name}"
