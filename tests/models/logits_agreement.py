"""Logits against transformers over many positions, in float32 on the CPU: families with random weights, or a model.

`python -m tests.models.logits_agreement 100000` prints a line per family. `… 8192 default` compares the default model
on Python's help texts, `… 2048 FILE.gguf` another model, which transformers reads from the file itself, its tokenizer
included. Tokens are computed in chunks over a paged store, several sequences side by side.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.bench.quality import all_logits, compare_logits, read_text
from quire.bench.transformers_baseline import as_llama
from quire.catalog.names import DEFAULT_MODEL
from quire.catalog.store import ignore, models_folder
from quire.catalog.wheel import fetch
from quire.config import EngineConfig
from quire.engine.build_runner import weights_of
from quire.engine.open_model import open_model
from quire.models.decoder import Decoder
from tests.kernels.cpu_kernels import cpu_kernels
from tests.models import families
from tests.models.running import in_chunks, run

LENGTH, CHUNK, WINDOW = 250, 100, 512
SIDE_BY_SIDE = 8
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n\treturn n",
    "日本の首都は東京です。",
    "  indented   text\twith tabs, 12345 and émojis 🙂\r\n\r\n",
)


class Agreement(NamedTuple):
    """KL divergence, and the gap of the chosen token in their logits, of each position: [tokens]."""

    kl: Tensor
    gaps: Tensor

    def describe(self, name: str) -> str:
        same = (self.gaps == 0).double().mean().item()
        return (
            f"{name:<16} {len(self.kl):>8,} positions   top-1 {100 * same:8.4f} %   mean KL {self.kl.mean():.1e}   "
            f"worst KL {self.kl.max():.1e}   worst gap {self.gaps.max():.1e}"
        )


def joined(parts: Iterator[tuple[Tensor, Tensor]]) -> Agreement:
    kl, gaps = zip(*parts, strict=True)
    return Agreement(torch.cat(kl), torch.cat(gaps))


@torch.inference_mode()
def of_family(family: families.Family, num_positions: int) -> Iterator[tuple[Tensor, Tensor]]:
    twin = families.build(family)
    ours = Decoder(twin.spec, twin.weights, cpu_kernels("torch"), families.MAX_POSITIONS)
    generator = torch.Generator().manual_seed(11)
    for _ in range(-(-num_positions // (LENGTH * SIDE_BY_SIDE))):
        prompts = torch.randint(families.VOCAB, (SIDE_BY_SIDE, LENGTH), generator=generator)
        theirs = twin.peer(prompts).logits.float()
        lengths = [LENGTH] * SIDE_BY_SIDE
        for right, mine in zip(theirs, run(ours, prompts.tolist(), in_chunks(lengths, CHUNK), 16), strict=True):
            yield compare_logits(right, mine.float())


@torch.inference_mode()
def of_file(path: Path, num_positions: int, theirs: Callable[[Any, Any], Any]) -> Iterator[tuple[Tensor, Tensor]]:
    opened = open_model(EngineConfig(str(path)))
    weights = weights_of(opened.checkpoint, torch.float32)
    ours = Decoder(opened.checkpoint.spec, weights, cpu_kernels("torch"), WINDOW)
    peer = theirs(opened.checkpoint.spec, weights)
    ids = read_text(None, opened, num_positions).ids
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        yield compare_logits(peer(torch.tensor([window])).logits[0], all_logits(ours, window))


def read_by_transformers(path: Path) -> Any:
    """The model of a GGUF file, dequantized by transformers. Its tokenizer must agree with ours."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    opened = open_model(EngineConfig(str(path)))
    for text in TEXTS:
        ours, theirs = opened.tokenizer.encode(text), tokenizer(text).input_ids
        assert ours == theirs, (text, ours, theirs)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def main(num_positions: int, which: str) -> None:
    torch.set_num_threads(1)
    if which == "default":
        path = fetch(DEFAULT_MODEL, models_folder(), ignore)
        parts = of_file(path, num_positions, lambda spec, weights: as_llama(spec, weights, torch.float32))
        print(joined(parts).describe(DEFAULT_MODEL.name), flush=True)
        return
    if which != "families":
        path = Path(which)
        parts = of_file(path, num_positions, lambda spec, weights: read_by_transformers(path))
        print(joined(parts).describe(path.stem), flush=True)
        return
    for family in families.FAMILIES:
        print(joined(of_family(family, num_positions)).describe(family.name), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "families")
