"""Attention of decode rows compiled on this machine: right, the same in any batch, dispensable."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ts_pippy_handler import native_attention, native_code
from ts_pippy_handler.native_attention import DecodeRows, NativeAttention, find_native_attention

CPU = torch.device("cpu")
NUM_SLOTS = 64
SLOTS = [[0], [*range(10, 17), 40, 41, 42], [*range(20, 40)], [63, 1, 2]]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs the C compiler of a Linux machine"
)


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    native_attention._compiled.cache_clear()
    yield
    native_attention._compiled.cache_clear()


def found(group: int = 3, key_dim: int = 16, value_dim: int = 16) -> NativeAttention | None:
    return find_native_attention(
        num_heads=2 * group, num_kv_heads=2, key_dim=key_dim, value_dim=value_dim, dtype=torch.float32, device=CPU
    )


class Example:
    def __init__(self, group: int, key_dim: int, value_dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.query_HTD = torch.randn(2 * group, len(SLOTS), key_dim, generator=generator)
        self.key_GSD = torch.randn(2, NUM_SLOTS, key_dim, generator=generator)
        self.value_GSD = torch.randn(2, NUM_SLOTS, value_dim, generator=generator)

    def attend(self, native: NativeAttention, rows: list[int]) -> torch.Tensor:
        heads, _, _ = self.query_HTD.shape
        out_THD = torch.full((len(SLOTS), heads, self.value_GSD.shape[2]), -7.0)
        decode = DecodeRows(rows, [torch.tensor(SLOTS[row]) for row in rows])
        native.attend(self.query_HTD, self.key_GSD, self.value_GSD, decode, 0.5, out_THD)
        return out_THD

    def expected(self) -> torch.Tensor:
        group = len(self.query_HTD) // 2
        rows = []
        for row, slots in enumerate(SLOTS):
            key_HLD = self.key_GSD[:, slots].repeat_interleave(group, 0).double()
            value_HLD = self.value_GSD[:, slots].repeat_interleave(group, 0).double()
            weights_HL = torch.softmax((key_HLD @ self.query_HTD[:, row, :, None].double())[..., 0] * 0.5, -1)
            rows.append((weights_HL[:, None] @ value_HLD)[:, 0])
        return torch.stack(rows)


@pytest.mark.parametrize("value_dim", [32, 48, 24, 5])
@pytest.mark.parametrize("key_dim", [32, 7])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_equals_attention_written_out(group: int, key_dim: int, value_dim: int) -> None:
    native = found(group, key_dim, value_dim)
    assert native is not None
    example = Example(group, key_dim, value_dim)
    torch.testing.assert_close(example.attend(native, [0, 1, 2, 3]).double(), example.expected(), rtol=1e-5, atol=1e-6)


def test_a_row_is_the_same_to_the_bit_in_any_batch_and_others_are_left_alone() -> None:
    native, example = found(), Example(3, 16, 16)
    assert native is not None
    together = example.attend(native, [0, 1, 2, 3])
    for row in range(len(SLOTS)):
        alone = example.attend(native, [row])
        assert torch.equal(alone[row], together[row])
        assert (alone[[other for other in range(len(SLOTS)) if other != row]] == -7).all()


@pytest.mark.parametrize("value_dim", [16, 7, 1])
@pytest.mark.parametrize("key_dim", [64, 7, 1])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_row_is_the_same_to_the_bit_wherever_its_tokens_lie(group: int, key_dim: int, value_dim: int) -> None:
    native, example = found(group, key_dim, value_dim), Example(group, key_dim, value_dim)
    assert native is not None
    for length in (3, 17, 30):
        together = torch.arange(length)
        scattered = 32 + torch.randperm(32, generator=torch.Generator().manual_seed(length))[:length]
        example.key_GSD[:, scattered] = example.key_GSD[:, together]
        example.value_GSD[:, scattered] = example.value_GSD[:, together]
        outputs = []
        for slots in (together, scattered):
            out_THD = torch.empty(len(SLOTS), 2 * group, value_dim)
            native.attend(example.query_HTD, example.key_GSD, example.value_GSD, DecodeRows([1], [slots]), 0.5, out_THD)
            outputs.append(out_THD[1])
        assert torch.equal(*outputs)


def test_strides_of_the_query_do_not_matter() -> None:
    native, example = found(), Example(3, 16, 16)
    assert native is not None
    plain = example.attend(native, [0, 1, 2, 3])
    example.query_HTD = example.query_HTD.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(example.attend(native, [0, 1, 2, 3]), plain)
    example.query_HTD = example.query_HTD.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(example.attend(native, [0, 1, 2, 3]), plain)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["key_GSD", "value_GSD", "query_HTD"])
def test_what_is_not_a_number_reaches_the_result_and_no_other_row(where: str, odd: float) -> None:
    native, example = found(), Example(3, 16, 16)
    assert native is not None
    fine = example.attend(native, [0, 1, 2, 3])
    index = (slice(None), 2) if where == "query_HTD" else (slice(None), 25)
    getattr(example, where)[index] = odd
    assert torch.isfinite(fine).all()
    damaged = example.attend(native, [0, 1, 2, 3])
    assert not torch.isfinite(damaged[2]).all()
    assert torch.equal(damaged[[0, 1, 3]], fine[[0, 1, 3]])


def test_several_threads() -> None:
    example = Example(3, 16, 16)
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            native = found()
            assert native is not None
            outputs.append(example.attend(native, [0, 1, 2, 3]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "changes", [{"dtype": torch.bfloat16}, {"device": torch.device("meta")}, {"num_heads": 8}, {"num_heads": 142}]
)
def test_layers_it_is_not_made_for(changes: dict[str, object]) -> None:
    values = {"num_heads": 2, "num_kv_heads": 2, "key_dim": 8, "value_dim": 8, "dtype": torch.float32, "device": CPU}
    assert find_native_attention(**(values | changes)) is None  # type: ignore[arg-type]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with caplog.at_level(logging.INFO):
        assert found() is None
    assert "no C compiler (no-such-compiler) here: torch's slower kernels compute attention" in caplog.text


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "cc --no-such-option")
    assert found() is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "cc failed: " in record.message
    assert "\n" not in record.message


ODD_COMPILERS = {
    "no command line": ("it's", "No closing quotation"),
    "fails with bytes that are no text": (r"""sh -c 'printf "\377\n" >&2; exit 1' """, "sh failed: "),
    "makes a library without our function": ("{folder}/empty", "undefined symbol: attend"),
    "makes no library": ("true", "compiled.so"),
}


@pytest.mark.parametrize("kind", ODD_COMPILERS)
def test_odd_compilers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, kind: str
) -> None:
    empty = tmp_path / "empty"
    empty.write_text(
        "#!/bin/sh\nfor last; do case $previous in -o) out=$last ;; esac; previous=$last; done\n"
        "exec cc -shared -fPIC -x c /dev/null -o $out\n"
    )
    empty.chmod(0o755)
    command, reason = ODD_COMPILERS[kind]
    monkeypatch.setenv("CC", command.format(folder=tmp_path))
    assert found() is None
    [record] = caplog.records
    assert record.message.startswith("torch's slower kernels compute attention, since ours cannot be compiled: ")
    assert reason in record.message


def test_a_compiler_that_works_and_prints_bytes_that_are_no_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "noisy"
    script.write_text('#!/bin/sh\nprintf "\\377\\n" >&2\nexec cc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert found() is not None


def test_a_compiler_that_never_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(native_code, "_COMPILE_TIMEOUT_S", 0.2)
    assert found() is None
    assert "slow did not end within 0.2 s" in caplog.text


def test_nothing_is_left_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert found() is not None
    assert os.listdir(tmp_path) == []


def test_the_source_compiles_without_warnings() -> None:
    source = Path(native_attention.__file__).parent / "decode_attention.c"
    shape = ["-DKEY_DIM=8", "-DVALUE_DIM=8", "-DGROUP=2"]
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fopenmp", *shape, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
