"""What a form of the weights loses: KL divergence and top-1 agreement with float32 weights of the same file.

The text is cut into windows of a few hundred tokens, each computed from its first token on, in chunks: as prompts are.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.step import Runner
from quire.engine.build import build
from quire.engine.open_model import OpenedModel
from quire.kernels.interface import StepLayout
from quire.models.interface import Model
from quire.runner.model_runner import ModelRunner

REFERENCE = {"dtype": "float32", "quantization": "none"}
_CHUNK, _BLOCK = 128, 16


class WeightQuality(NamedTuple):
    """One form of the weights against the reference, over all positions of a text."""

    settings: str
    weights: str  # as the start report describes them
    num_positions: int
    agreement: float  # share of positions with the same likeliest token
    mean_kl: float  # nats
    worst_kl: float
    worst_gap: float  # how much less likely, in logits of the reference, a chosen token is


class SampleText(NamedTuple):
    """A text in tokens."""

    name: str
    ids: tuple[int, ...]
    sha256: str  # of the whole text


def read_text(path: Path | None, opened: OpenedModel, num_positions: int) -> SampleText:
    """The first tokens of a file; without one, of the help texts that come with Python."""
    if opened.tokenizer is None:
        raise ConfigError(f"{opened.name} has no tokenizer, so that it reads no text.", param="model")
    if path is None:
        name, text = "Python's help texts", "\n".join(topics[name] for name in sorted(topics))
    else:
        name, text = path.name, path.read_text(encoding="utf-8", errors="replace")
    # A token has a few characters: no need to tokenize all of a large file.
    ids = opened.tokenizer.encode(text[: 16 * num_positions])[:num_positions]
    if len(ids) < 2:
        raise ConfigError(f"{name} has {len(ids)} tokens; give a longer --text.", param="text")
    return SampleText(name, tuple(ids), hashlib.sha256(text.encode()).hexdigest())


def measure_quality(
    config: EngineConfig,
    opened: OpenedModel,
    forms: Mapping[str, Mapping[str, object]],  # settings of quire, by the text that names them
    ids: Many[int],
    window: int,
    say: Callable[[str], None],
) -> Iterator[WeightQuality]:
    """One form after the other. The reference's logits are kept: vocabulary × positions × 4 bytes."""
    windows = [tuple(ids[start : start + window]) for start in range(0, len(ids), window)]
    say("reference: float32")
    model, _ = _load(config, opened, REFERENCE, window)
    exact = [all_logits(model, each) for each in windows]
    for name, settings in forms.items():
        say(name or "default")
        model, described = _load(config, opened, settings, window)
        parts = [compare_logits(right, all_logits(model, each)) for right, each in zip(exact, windows, strict=True)]
        kl, gaps = (torch.cat(part) for part in zip(*parts, strict=True))
        yield WeightQuality(
            settings=name or "default",
            weights=described,
            num_positions=len(kl),
            agreement=(gaps == 0).double().mean().item(),
            mean_kl=kl.double().mean().item(),
            worst_kl=kl.max().item(),
            worst_gap=gaps.max().item(),
        )


def compare_logits(exact: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, vocab] each. KL divergence and gap of each token, see `WeightQuality`: [tokens] each."""
    kl = F.kl_div(other.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    chosen = other.argmax(dim=-1, keepdim=True)
    return kl, exact.amax(dim=-1) - exact.gather(1, chosen)[:, 0]


def _load(config: EngineConfig, opened: OpenedModel, settings: Mapping[str, object], window: int) -> tuple[Model, str]:
    """The model as an engine with these settings computes it, and its weights in words."""
    seen: list[Runner] = []

    def observe(runner: Runner) -> Runner:
        seen.append(runner)
        return runner

    length = max(2, min(window, opened.checkpoint.spec.max_positions))
    small = {"max_num_seqs": 1, "max_model_len": length, "enable_prefix_caching": False}
    changed = replace(config, **{**small, **settings})  # type: ignore[arg-type]  # EngineConfig checks each
    built = build(changed, observe=observe, opened=opened)
    [runner] = seen
    assert isinstance(runner, ModelRunner), runner
    return runner.model, built.weights.describe()


@torch.inference_mode()
def all_logits(model: Model, ids: Many[int]) -> Tensor:
    """The logits after every token of one sequence: [tokens, vocab] float32."""
    geometry, num_blocks = model.kv_geometry, -(-len(ids) // _BLOCK)
    kv = torch.zeros(geometry.store_shape(1 + num_blocks, _BLOCK), dtype=geometry.dtype)
    tokens, table = torch.tensor(ids), torch.arange(1, 1 + num_blocks, dtype=torch.int32)
    logits = []
    for start in range(0, len(ids), _CHUNK):
        positions = torch.arange(start, min(start + _CHUNK, len(ids)))
        layout = StepLayout(
            positions=positions,
            slots=positions + _BLOCK,  # blocks in order, behind the null block
            tables=table[None],
            query_starts=torch.tensor([0, len(positions)], dtype=torch.int32),
            context_lengths=torch.tensor([int(positions[-1]) + 1], dtype=torch.int32),
            max_lengths=torch.full((len(positions),), len(ids)),
        )
        logits.append(model.logits(model.forward(tokens[positions], layout, kv)))
    return torch.cat(logits)
