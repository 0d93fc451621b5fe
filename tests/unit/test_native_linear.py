"""Linear layers compiled on this machine: right, the same in any batch, dispensable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ts_pippy_handler import native_linear
from ts_pippy_handler.native_linear import find_multiply, linear, pack

pytestmark = pytest.mark.skipif(
    sys.platform != "linux"
    or shutil.which("cc") is None
    or "AVX2" not in torch.__config__.show()
    or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="needs the C compiler of a Linux machine with AVX2",
)


@pytest.fixture(autouse=True)
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wider processors run the same code, so it is tested on them too."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    find_multiply.cache_clear()
    yield
    find_multiply.cache_clear()


def random(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def multiplied(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, part: int | None = None
) -> torch.Tensor:
    parts = weight.split(part or len(weight))
    return linear(rows, [pack(own) for own in parts], [len(own) for own in parts], bias)


@pytest.mark.parametrize("num_inputs", [1, 7, 640, 641, 1536])
@pytest.mark.parametrize("num_outputs", [1, 15, 16, 17, 48])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 11, 13, 64])
def test_equals_a_product_in_float64(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    assert find_multiply() is not None
    rows, weight, bias = random(num_rows, num_inputs), random(num_outputs, num_inputs), random(num_outputs)
    exact = rows.double() @ weight.double().T
    # Rounding of that many sums, should the errors be of either sign; a sum that lacks one input is much further off.
    allowed = torch.finfo(torch.float32).eps * (num_inputs + 1) ** 0.5 * (rows.abs() @ weight.abs().T + 1)
    for given in (None, bias):
        expected = exact if given is None else exact + given
        assert ((multiplied(rows, weight, given) - expected).abs() <= allowed).all()


@pytest.mark.parametrize("part", [1, 16, 20, 32])
def test_a_weight_in_parts_gives_the_same_to_the_bit(part: int) -> None:
    rows, weight, bias = random(9, 24), random(50, 24), random(50)
    assert torch.equal(multiplied(rows, weight, bias, part), multiplied(rows, weight, bias))


@pytest.mark.parametrize("num_outputs", [40, 48])
def test_a_row_is_the_same_to_the_bit_in_any_batch(num_outputs: int) -> None:
    rows, weight, bias = random(23, 1300), random(num_outputs, 1300), random(num_outputs)
    together = multiplied(rows, weight, bias)
    for num_rows in range(1, len(rows)):
        assert torch.equal(multiplied(rows[:num_rows], weight, bias), together[:num_rows])
        assert torch.equal(multiplied(rows[-num_rows:], weight, bias), together[-num_rows:])


def test_several_threads() -> None:
    rows, weight = random(9, 70), random(200, 70)
    before = torch.get_num_threads()
    try:
        products = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            products.append(multiplied(rows, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])


def test_shapes_and_strides_of_the_rows() -> None:
    rows, weight = random(2, 3, 24), random(20, 24)
    product = multiplied(rows, weight)
    assert product.shape == (2, 3, 20)
    assert torch.equal(product.reshape(6, 20), multiplied(rows.reshape(6, 24), weight))
    assert torch.equal(multiplied(rows.transpose(0, 1), weight), product.transpose(0, 1))
    assert multiplied(rows[:, :0], weight).shape == (2, 0, 20)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_reaches_its_row_and_no_other(odd: float) -> None:
    rows, weight = random(8, 24), random(20, 24)
    fine = multiplied(rows, weight)
    rows[3, 5] = odd
    damaged = multiplied(rows, weight)
    assert not torch.isfinite(damaged[3]).any()
    others = [row for row in range(8) if row != 3]
    assert torch.equal(damaged[others], fine[others])


@pytest.mark.parametrize("capability", ["AVX512", "DEFAULT", "NO AVX"])
def test_processors_it_is_not_made_for(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert find_multiply() is None


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with caplog.at_level("INFO"):
        assert find_multiply() is None
    assert "no C compiler (no-such-compiler) here: torch's slower kernels compute linear layers" in caplog.text


def test_nothing_is_left_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert find_multiply() is not None
    assert os.listdir(tmp_path) == []


def test_the_source_compiles_without_warnings() -> None:
    source = Path(native_linear.__file__).parent / "linear.c"
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-march=native", "-fopenmp", "-fsyntax-only"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
