"""The start report says which encoding the weights have in memory, why, and their bytes before and after."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from quire.bench.environment import settings
from quire.config import EngineConfig
from quire.engine.build import BuiltEngine, build
from quire.engine.startup import StartupPhase, StartupReporter
from quire.engine.stats import WeightUsage
from quire.formats.presets import SHAPES
from tests.bench.conftest import TINY
from tests.kernels.cpu_kernels import needs_native

GIB = 1 << 30
GGUF = WeightUsage(
    num_bytes=GIB,
    encodings={"Q8_0": 1, "Q4_1": 210},
    dtype="bfloat16",
    dtype_bytes=3 * GIB,
    stored={"Q4_1": 210, "Q8_0": 1},
    stored_bytes=GIB,
)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "1.00 GiB: 210 matrices as Q4_1, 1 as Q8_0, as the file stores them (3.00 GiB as bfloat16)"),
        (
            {"quantization": "int8"},
            "1.00 GiB: 210 matrices as Q4_1, 1 as Q8_0, as the file stores them: int8 is not smaller",
        ),
        (
            {"encodings": {"BF16": 121}, "num_bytes": 3 * GIB, "quantization": "none"},
            "3.00 GiB bfloat16, from 1.00 GiB Q4_1 and Q8_0 in the file (quantization none)",
        ),
        (
            {"encodings": {"float32": 121}, "num_bytes": 6 * GIB, "dtype": "float32"},
            "6.00 GiB float32, from 1.00 GiB Q4_1 and Q8_0 in the file (dtype float32)",
        ),
        (
            {"encodings": {"int8": 121}, "stored": {"BF16": 211}, "stored_bytes": 3 * GIB, "quantization": "int8"},
            "1.00 GiB int8, quantized from 3.00 GiB bfloat16",
        ),
        (
            {"encodings": {"int4": 120, "int8": 1}, "stored": {}, "stored_bytes": 0, "quantization": "int4"},
            "1.00 GiB: 120 matrices as int4, 1 as int8, quantized from 3.00 GiB bfloat16",
        ),
        ({"encodings": {"bfloat16": 121}, "stored": {}, "stored_bytes": 0}, "1.00 GiB bfloat16"),
        ({"encodings": {"BF16": 121}, "stored": {"BF16": 211}}, "1.00 GiB bfloat16, as the file stores them"),
    ],
)
def test_weights_are_described_as_they_are(changed: Mapping[str, object], text: str) -> None:
    assert replace(GGUF, **changed).describe() == text  # type: ignore[arg-type]


def started(model: str, **given: object) -> tuple[BuiltEngine, str]:
    """The engine, and its line about the weights."""
    phases: list[StartupPhase] = []
    config = EngineConfig(model, device="cpu", kv_cache_memory=1 << 22, max_model_len=64, **given)  # type: ignore[arg-type]
    built = build(config, StartupReporter(finished=phases.append))
    [line] = [phase.detail for phase in phases if phase.name == "weights"]
    assert settings(built)["weights"] == line and built.info.memory.weights == built.weights.num_bytes
    return built, line


@needs_native
@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_a_quantized_file_is_reported_as_it_is_kept(quantization: str, shallow_model_path: Path) -> None:
    built, line = started(str(shallow_model_path), dtype="bfloat16", quantization=quantization)
    stored, weights = built.checkpoint.tensors.values(), built.weights
    names = {tensor.encoding for tensor in stored if len(tensor.shape) == 2}
    if quantization == "none":
        assert (built.dtype, built.info.dtype) == ("bfloat16", "bfloat16")
        assert weights.num_bytes > 1.5 * weights.stored_bytes and "from " in line
    else:
        assert set(weights.encodings) == names and sum(weights.encodings.values()) == 2 * 7 + 1
        assert weights.num_bytes < 1.1 * built.checkpoint.num_bytes
        assert all(name in built.info.dtype and name in line for name in names)
        assert "as the file stores them" in line


@needs_native
@pytest.mark.parametrize(("quantization", "parts"), [("int8", {"int8": 9}), ("int4", {"int4": 8, "int8": 1})])
def test_quantization_at_load_is_reported(
    quantization: str, parts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(TINY, hidden_size=64, head_dim=32, ffn_size=96)
    monkeypatch.setitem(SHAPES, "small", shape)
    built, line = started("small", load_format="dummy", dtype="bfloat16", quantization=quantization)
    assert dict(built.weights.encodings) == parts
    assert built.weights.num_bytes < 0.7 * built.weights.dtype_bytes
    assert line.endswith("quantized from 0.00 GiB bfloat16")
