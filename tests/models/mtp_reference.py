"""A multi-token-prediction layer in transformers' modules, as MiMo's files hold one; and training on what a model says.

It reads what leaves the last layer of the model, before the final norm; for later drafts what it adds up itself.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from tests.llm.tiny import END, VOCAB, write_model

PREFIX = "model.mtp_layers.0."


def tiny_qwen2(vocab_size: int = VOCAB, seed: int = 0) -> Qwen2ForCausalLM:
    """Random weights, large enough for widely spread logits."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=END,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """As made, norms are all one and biases all zero: nothing would notice them."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn_like(parameter)
        else:
            parameter *= 4


class ReferenceMtpLayer(nn.Module):
    """One layer, with the embedding and the head of its model."""

    def __init__(self, target: Qwen2ForCausalLM, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = target.config
        self._target, self._rotary = [target], [Qwen2RotaryEmbedding(config)]  # lists: no parts of the layer
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Qwen2DecoderLayer(config, 0)
        randomize(self)

    @property
    def target(self) -> Qwen2ForCausalLM:
        return self._target[0]

    @torch.no_grad()
    def states(self, text: list[int]) -> Tensor:
        """[tokens, hidden]: what leaves the last layer of the model."""
        found: list[Tensor] = []
        hook = self.target.model.layers[-1].register_forward_hook(lambda _, __, output: found.append(output))
        self.target(torch.tensor([text]))
        hook.remove()
        return found[0][0]

    def pairs(self, tokens: Tensor, before: Tensor) -> Tensor:
        """[tokens, hidden]: the output for each token beside the state before it, not normed."""
        embedded = self.target.get_input_embeddings()(tokens).detach()
        joined = self.input_proj(torch.cat([self.hidden_layernorm(before), self.token_layernorm(embedded)], dim=-1))
        count = len(tokens)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotation = self._rotary[0](joined[None], torch.arange(count)[None])
        return self.block(joined[None], attention_mask=mask, position_embeddings=rotation)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.lm_head(self.final_layernorm(hidden))

    @torch.no_grad()
    def drafts(self, text: list[int], count: int) -> list[int]:
        """The likeliest tokens behind a text, each from the output for the one before."""
        tokens, before = torch.tensor(text[1:]), self.states(text)[:-1]
        found: list[int] = []
        for _ in range(count):
            hidden = self.pairs(tokens, before)
            found.append(int(self.logits(hidden[-1]).argmax()))
            tokens, before = torch.cat([tokens, torch.tensor(found[-1:])]), torch.cat([before, hidden[-1:]])
        return found

    def train_on(self, texts: list[list[int]], steps: int) -> "ReferenceMtpLayer":
        """Learn what follows in these texts."""
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        for _ in range(steps):
            losses = [
                F.cross_entropy(
                    self.logits(self.pairs(torch.tensor(text[1:-1]), self.states(text)[:-2])), torch.tensor(text[2:])
                )
                for text in texts
            ]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
        return self

    def write(self, folder: Path, *, without: str = "", copies: int = 1, **changes: object) -> Path:
        """The model with its layer, as a published checkpoint is; without a tensor, or with another configuration."""
        write_model(folder, self.target, self.target.config.vocab_size)
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": copies}
        (folder / "config.json").write_text(json.dumps(config | changes))
        tensors = load_file(folder / "model.safetensors")
        for number in range(copies):
            for name, tensor in self.state_dict().items():
                if name.removeprefix("block.") != without:
                    stored = PREFIX.replace("0", str(number)) + name.removeprefix("block.")
                    tensors[stored] = tensor.contiguous().clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
