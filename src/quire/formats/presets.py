"""Shapes of real models by name, for dummy weights without files. Values as published."""

from difflib import get_close_matches
from pathlib import Path

from quire.core.errors import ModelNotFound
from quire.core.model import ModelSpec, RopeKind, RopeSpec
from quire.formats.checkpoint import Checkpoint, CheckpointSource


def _llama3(factor: float, *, layers: int, hidden: int, heads: int, dim: int, ffn: int, tied: bool) -> ModelSpec:
    rope = RopeSpec(500_000.0, dim, RopeKind.LLAMA3, factor=factor, original_max_positions=8192)
    return ModelSpec(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=dim,
        ffn_size=ffn,
        vocab_size=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        rope=rope,
        tied_embeddings=tied,
    )


def _qwen3(*, layers: int, hidden: int, heads: int, ffn: int, tied: bool) -> ModelSpec:
    return ModelSpec(
        family="qwen3",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=ffn,
        vocab_size=151_936,
        max_positions=40_960,
        norm_eps=1e-6,
        rope=RopeSpec(1_000_000.0, 128),
        tied_embeddings=tied,
        qk_norm=True,
    )


SHAPES: dict[str, ModelSpec] = {
    "llama-3.1-8b": _llama3(8.0, layers=32, hidden=4096, heads=32, dim=128, ffn=14_336, tied=False),
    "llama-3.2-1b": _llama3(32.0, layers=16, hidden=2048, heads=32, dim=64, ffn=8192, tied=True),
    "qwen3-0.6b": _qwen3(layers=28, hidden=1024, heads=16, ffn=3072, tied=True),
    "qwen3-1.7b": _qwen3(layers=28, hidden=2048, heads=16, ffn=6144, tied=True),
    "qwen3-4b": _qwen3(layers=36, hidden=2560, heads=32, ffn=9728, tied=True),
    "qwen3-8b": _qwen3(layers=36, hidden=4096, heads=32, ffn=12_288, tied=False),
    "qwen3-14b": _qwen3(layers=40, hidden=5120, heads=40, ffn=17_408, tied=False),
    "smollm2-135m": ModelSpec(
        family="llama",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_size=1536,
        vocab_size=49_152,
        max_positions=8192,
        norm_eps=1e-5,
        rope=RopeSpec(100_000.0, 64),
        tied_embeddings=True,
    ),
}


def dummy_checkpoint(name: str) -> Checkpoint:
    """A checkpoint without files at a named real shape; it has no tokenizer and no end tokens."""
    spec = SHAPES.get(name.lower())
    if spec is None:
        nearest = get_close_matches(name.lower(), SHAPES, n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise ModelNotFound(f"There is no shape named {name!r}; there are {', '.join(SHAPES)}.{hint}")
    return Checkpoint(source=CheckpointSource.DUMMY, path=Path(name.lower()), spec=spec)
