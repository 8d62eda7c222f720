"""An EAGLE-3 head in plain torch, whose state dict is the file of one; and training on what a model says."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

EPSILON, THETA = 1e-6, 10_000.0


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.weight


def _linear(width: int, out: int) -> nn.Linear:
    return nn.Linear(width, out, bias=False)


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, self.dim = heads, keys, hidden // heads
        self.q_proj = _linear(2 * hidden, hidden)
        self.k_proj, self.v_proj = (_linear(2 * hidden, keys * self.dim) for _ in range(2))
        self.o_proj = _linear(hidden, hidden)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        queries = _rotated(self.q_proj(x).view(len(x), self.heads, self.dim), positions)
        keys = _rotated(self.k_proj(x).view(len(x), self.keys, self.dim), positions)
        values = self.v_proj(x).view(len(x), self.keys, self.dim)
        keys, values = (each.repeat_interleave(self.heads // self.keys, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.dim**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        return self.o_proj(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1))


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    frequencies = THETA ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = torch.outer(positions.float(), frequencies)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


class _Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = _linear(hidden, ffn), _linear(hidden, ffn), _linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, keys: int, ffn: int) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Norm(hidden) for _ in range(3))
        self.self_attn = _Attention(hidden, heads, keys)
        self.mlp = _Mlp(hidden, ffn)

    def forward(self, embedded: Tensor, before: Tensor, positions: Tensor) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(before)], dim=-1)
        residual = before + self.self_attn(both, positions)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class ReferenceHead(nn.Module):
    """Drafts tokens 3, 5, 7, … of the model: every second one."""

    def __init__(self, target: LlamaForCausalLM, layers: tuple[int, ...], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = target.config
        self._target, self.layers = [target], layers  # a list: no part of the head
        self.heads, self.keys, self.ffn = config.num_attention_heads, config.num_key_value_heads, 80
        self.hidden, self.vocab = config.hidden_size, config.vocab_size
        tokens = torch.arange(3, config.vocab_size, 2)
        self.fc = _linear(len(layers) * self.hidden, self.hidden)
        self.midlayer = _Layer(self.hidden, self.heads, self.keys, self.ffn)
        self.norm = Norm(self.hidden)
        self.lm_head = _linear(self.hidden, len(tokens))
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))
        self.register_buffer("t2d", torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, tokens, True))

    @property
    def target(self) -> LlamaForCausalLM:
        return self._target[0]

    def states(self, text: list[int]) -> Tensor:
        """[tokens, hidden]: what the head reads of the model."""
        with torch.no_grad():
            found = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        return self.fc(torch.cat([found[layer][0] for layer in self.layers], dim=-1))

    def pairs(self, tokens: Tensor, before: Tensor) -> Tensor:
        """[tokens, hidden]: the output for each token beside the state before it."""
        embedded = self.target.get_input_embeddings()(tokens).detach()
        return self.midlayer(embedded, before, torch.arange(len(tokens)))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    @torch.no_grad()
    def drafts(self, text: list[int], count: int) -> list[int]:
        """The likeliest tokens behind a text, each from the output for the one before."""
        tokens, before = torch.tensor(text[1:]), self.states(text)[:-1]
        found: list[int] = []
        for _ in range(count):
            hidden = self.pairs(tokens, before)
            place = int(self.logits(hidden[-1]).argmax())
            found.append(place + int(self.d2t[place]))
            tokens, before = torch.cat([tokens, torch.tensor(found[-1:])]), torch.cat([before, hidden[-1:]])
        return found

    def train_on(self, texts: list[list[int]], steps: int) -> "ReferenceHead":
        """Learn what follows in these texts, of the tokens that it has."""
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        place_of = torch.full((self.vocab,), -100)
        tokens = torch.arange(len(self.d2t)) + self.d2t
        place_of[tokens] = torch.arange(len(tokens))
        for _ in range(steps):
            losses = []
            for text in texts:
                hidden = self.pairs(torch.tensor(text[1:-1]), self.states(text)[:-2])
                losses.append(F.cross_entropy(self.logits(hidden), place_of[torch.tensor(text[2:])]))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
        return self

    def write(
        self, folder: Path, *, embed_tokens: bool = False, prefix: str = "", without: str = "", **changes: object
    ) -> Path:
        """As a published checkpoint is; without a tensor, or with another configuration (None: without that field)."""
        folder.mkdir(exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.keys,
            "max_position_embeddings": 512,
            "rms_norm_eps": EPSILON,
            "vocab_size": self.vocab,
            "draft_vocab_size": len(self.d2t),
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
        }
        (folder / "config.json").write_text(json.dumps(config | changes))
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items() if name != without}
        if embed_tokens:
            tensors["embed_tokens.weight"] = self.target.get_input_embeddings().weight.detach().contiguous()
        save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder
