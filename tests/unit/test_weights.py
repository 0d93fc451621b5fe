"""Tensors are found in every usual layout of a checkpoint, and damage is named with file and tensor."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models import Checkpoints, copy_checkpoint
from ts_pippy_handler.errors import CheckpointError
from ts_pippy_handler.weights import Checkpoint

LAYOUTS = {
    "sharded safetensors": ({}, "model.safetensors.index.json"),
    "single safetensors": ({"shard_bytes": None}, "model.safetensors"),
    "sharded bin": ({"file_format": "bin"}, "pytorch_model.bin.index.json"),
    "single bin": ({"file_format": "bin", "shard_bytes": None}, "pytorch_model.bin"),
}
NAME = "model.layers.1.mlp.up_proj.weight"
SHAPE = (96, 64)


@pytest.fixture
def damaged(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy of a sharded checkpoint, to be damaged."""
    return copy_checkpoint(checkpoints("llama", layers=2), tmp_path / "copy")


def truth(checkpoints: Checkpoints) -> dict[str, torch.Tensor]:
    files = checkpoints("llama", layers=2).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def shard_of(directory: Path, name: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][name]


def rewrite(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors(checkpoints: Checkpoints, layout: str) -> None:
    options, entry = LAYOUTS[layout]
    directory = checkpoints("llama", layers=2, **options)
    assert (directory / entry).is_file()
    checkpoint = Checkpoint(str(directory))
    for name, expected in truth(checkpoints).items():
        assert name in checkpoint.names
        read = torch.full(expected.shape, torch.nan)
        checkpoint.read_into(name, read)
        assert torch.equal(read, expected)
    assert "no.such.tensor" not in checkpoint.names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_file_may_be_named(checkpoints: Checkpoints, layout: str) -> None:
    options, entry = LAYOUTS[layout]
    assert NAME in Checkpoint(str(checkpoints("llama", layers=2, **options)), entry).names


def test_a_file_of_another_name_is_found_when_it_is_the_only_one(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert "a" in Checkpoint(str(tmp_path)).names
    save_file({"b": torch.ones(2)}, tmp_path / "more.safetensors")
    with pytest.raises(
        CheckpointError, match=r"no weights found; .*; 2 files such as more\.safetensors are there, but no index"
    ):
        Checkpoint(str(tmp_path))
    assert "b" in Checkpoint(str(tmp_path), "more.safetensors").names


def test_values_are_converted_to_the_target(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.5, -2.25], dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    target = torch.zeros(2)
    Checkpoint(str(tmp_path)).read_into("a", target)
    assert target.tolist() == [1.5, -2.25]


@pytest.mark.parametrize(
    ("present", "asked", "found"),
    [
        ("model.x", ["model.x"], "model.x"),
        ("x", ["model.x"], "x"),
        ("model.x", ["x"], "model.x"),
        ("b", ["a", "b"], "b"),
        ("model.model.x", ["x"], None),
        ("y", ["x"], None),
    ],
)
def test_names_are_found_under_another_prefix(
    tmp_path: Path, present: str, asked: list[str], found: str | None
) -> None:
    save_file({present: torch.ones(1)}, tmp_path / "model.safetensors")
    assert Checkpoint(str(tmp_path)).find(asked, "model") == found


def test_no_weights(model_dir: Path) -> None:
    with pytest.raises(
        CheckpointError, match=f"^{model_dir}: no weights found; looked for .*pytorch_model.bin.index.json$"
    ):
        Checkpoint(str(model_dir))


def test_a_named_index_that_is_not_there(model_dir: Path) -> None:
    message = f"^handler.index_filename: 'other.json' is not in {model_dir}$"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(str(model_dir), "other.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{ broken", "Expecting property name"),
        ("", "it is empty"),
        ("[]", r"must hold a JSON object, got \[\]"),
        ("null", "must hold a JSON object, got None"),
        ("\ufeff{}", "begins with a UTF-8 byte order mark, with which transformers does not read it"),
        ("{}", r"not a checkpoint index with a 'weight_map': its keys are \[\]"),
        ('{"weight_map": 5}', "not a checkpoint index with a 'weight_map': it is 5"),
    ],
)
def test_a_damaged_index(damaged: Path, text: str, message: str) -> None:
    index = damaged / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(index))}: {message}"):
        Checkpoint(str(damaged))


def test_a_missing_shard(damaged: Path) -> None:
    file = shard_of(damaged, NAME)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name}: missing, although model.safetensors.index.json says it"):
        Checkpoint(str(damaged))


def test_a_tensor_that_the_index_lists_but_no_file_holds(damaged: Path) -> None:
    file = shard_of(damaged, NAME)
    rewrite(file, lambda tensors: tensors.pop(NAME))
    checkpoint = Checkpoint(str(damaged))
    assert NAME not in checkpoint.names, "which is an error only if the model needs it"
    for asked in (["other", NAME], [NAME.removeprefix("model.")]):
        assert checkpoint.where_missing(asked, "model") == (
            f"{file}: tensor {NAME!r} is missing, although model.safetensors.index.json lists it"
        )
    assert checkpoint.where_missing(["other"], "model").endswith(
        "index.json: holds no tensor 'other', which the model needs"
    )


def test_the_files_say_what_they_hold_and_not_the_index(damaged: Path) -> None:
    """transformers takes from the index only which files there are; the last of them that holds a tensor counts."""
    index = damaged / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    files = sorted(set(written["weight_map"].values()))
    own = written["weight_map"].pop(NAME)
    assert own == files[-1]
    written["weight_map"]["model.norm.weight"] = files[0]
    index.write_text(json.dumps(written))
    rewrite(damaged / files[0], lambda tensors: tensors.update({NAME: torch.zeros(SHAPE)}))
    found = Checkpoint(str(damaged))
    theirs = AutoModelForCausalLM.from_pretrained(damaged).state_dict()
    for name in (NAME, "model.norm.weight"):
        read = torch.empty(theirs[name].shape)
        found.read_into(name, read)
        assert torch.equal(read, theirs[name])
    assert read.abs().sum()


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5])
def test_a_truncated_file(damaged: Path, keep: float) -> None:
    file = shard_of(damaged, NAME)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    reason = {0: "it is empty", 100: r"its header should have \d+ bytes, the whole file has 100"}
    reason |= {0.5: rf"it has {len(data) // 2} bytes, by its header it should have {len(data)}"}
    with pytest.raises(
        CheckpointError, match=f"^{re.escape(str(file))}: unreadable or truncated: {reason.get(keep, '')}"
    ):
        Checkpoint(str(damaged))


@pytest.mark.parametrize("data", [b"", b"junk", b"PK\x03\x04junk"])
def test_a_damaged_bin_file(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}: unreadable or truncated: "):
        Checkpoint(str(tmp_path))


class Evil:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> tuple:
        return (print, ("pickled code ran",))


def test_a_bin_file_that_holds_code_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": Evil()}, file)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}: "):
        Checkpoint(str(tmp_path))
    assert "pickled code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [{"a": 1}, {"a": torch.ones(2)}], ids=["no tensors", "tensors"])
def test_a_plain_pickle_is_refused_in_one_line(tmp_path: Path, content: dict) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(content))
    message = rf"^{file}: damaged, or no file of tensors that can be read safely \(weights only\): [^\n]*; save [^\n]*$"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list, not tensors by name; save the model's tensors anew, best as safetensors"),
        (torch.ones(2), "holds a Tensor, not tensors by name"),
        ({}, "holds 0 entries, none of them a tensor with a name"),
        ({"step": 3, 7: torch.ones(2)}, "holds 2 entries, none of them a tensor with a name"),
        ({"step": 3, "state_dict": {"a": torch.ones(2)}}, "its tensors lie one level down, under 'state_dict'; save"),
        ({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "loss": torch.ones(1)}, "one level down, under 'model'"),
    ],
)
def test_a_bin_file_of_other_things(tmp_path: Path, content: object, message: str) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}: .*{re.escape(message)}"):
        Checkpoint(str(tmp_path))


def test_what_is_no_tensor_in_a_bin_file_is_passed_over(tmp_path: Path) -> None:
    torch.save({"step": 3, "a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert Checkpoint(str(tmp_path)).names == ["a"]


@pytest.mark.parametrize("outside", ["../weights.bin", "/etc/passwd", "sub/../../weights.bin"])
def test_an_index_leads_to_files_of_the_checkpoint_only(damaged: Path, outside: str) -> None:
    index = damaged / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": outside}}))
    message = f"{index}: says that tensor 'a' is in {outside!r}, outside the checkpoint's directory"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
        Checkpoint(str(damaged))


def test_an_index_that_names_a_file_of_text(damaged: Path) -> None:
    (damaged / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (damaged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "passwd"}}))
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(damaged / 'passwd'))}: unreadable or truncated: "):
        Checkpoint(str(damaged))


def test_links_to_files_elsewhere_are_the_hubs_way(damaged: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(damaged.glob("*.safetensors")):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    target = torch.empty(SHAPE)
    Checkpoint(str(damaged)).read_into(NAME, target)


def test_a_bin_file_of_the_old_format(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    target = torch.zeros(3)
    Checkpoint(str(tmp_path)).read_into("a", target)
    assert target.tolist() == [1, 1, 1]


def test_a_file_of_the_old_format_is_read_once_not_for_every_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {name: torch.randn(64, 40_000) for name in "ab"}
    torch.save(values, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    checkpoint = Checkpoint(str(tmp_path))
    loads, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loads.append(kwargs) or load(*args, **kwargs))
    for name, value in values.items():
        target = torch.zeros(64, 40_000)
        checkpoint.read_into(name, target)
        assert torch.equal(target, value)
    assert len([kwargs for kwargs in loads if not kwargs.get("mmap")]) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64, torch.complex64])
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_the_header_tells_what_is_no_weight(tmp_path: Path, dtype: torch.dtype, file_format: str) -> None:
    tensors = {"a": torch.ones(3).to(dtype), "b": torch.ones(3, dtype=torch.float16)}
    if file_format == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"{file_format}: tensor 'a' is of dtype .*; only weights stored as"):
        checkpoint.check("a", [3])
    checkpoint.check("a", [3], is_weight=False)
    checkpoint.check("b", [3])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_values_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(3).to(dtype)}, tmp_path / "model.safetensors")
    message = f"model.safetensors: cannot read tensor 'a': its dtype is {dtype}, as of a quantised weight"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint(str(tmp_path)).read_into("a", torch.zeros(3))


def test_two_copies_of_one_weight(tmp_path: Path) -> None:
    value = torch.randn(300, 8000)  # more than one piece
    changed = value.clone()
    changed[-1, -1] += 1
    tensors = {"one": value, "two": value.clone(), "changed": changed, "short": value[:1].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.find_equal(["none", "two", "one"], "model") == "two"
    assert checkpoint.find_equal(["none"], "model") is None
    for other in ("changed", "short"):
        with pytest.raises(CheckpointError, match=f"'one' and '{other}' are one weight in the model, but differ here"):
            checkpoint.find_equal(["one", other], "model")


def test_a_wrong_shape(damaged: Path) -> None:
    file = shard_of(damaged, NAME)
    message = f"{file}: tensor '{NAME}' has shape [96, 64], the model needs [96, 65]"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        Checkpoint(str(damaged)).check(NAME, [96, 65])


def test_a_file_that_is_damaged_after_it_was_found(damaged: Path) -> None:
    checkpoint = Checkpoint(str(damaged))
    file = shard_of(damaged, NAME)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: cannot read tensor '{NAME}': ")):
        checkpoint.read_into(NAME, torch.empty(SHAPE))
