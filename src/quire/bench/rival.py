"""transformers' `generate` on the very weights that quire runs, for races in one process."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quire.bench.workload import Job
from quire.core.errors import UnsupportedModel
from quire.core.model import ModelSpec, RopeKind
from quire.models.parameters import DecoderWeights


def as_llama(spec: ModelSpec, weights: DecoderWeights, dtype: torch.dtype) -> LlamaForCausalLM:
    """A transformers model over the same numbers. Only plain Llama shapes, such as the default model's."""
    if spec.family != "llama" or spec.rope.kind is not RopeKind.PLAIN:
        raise UnsupportedModel(
            f"The race knows plain Llama shapes, not {spec.family} with {spec.rope.kind.value} rope."
        )
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tied_embeddings,
        attention_bias=spec.qkv_bias,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu")
    state = _state(spec, weights)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, strict=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    return model.eval()


def _state(spec: ModelSpec, weights: DecoderWeights) -> dict[str, Tensor]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.head,
    }
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        query, key, value = torch.split(layer.qkv, [queries, keys, keys])
        gate, up = layer.gate_up.chunk(2)
        state |= {
            prefix + "input_layernorm.weight": layer.attention_norm,
            prefix + "self_attn.q_proj.weight": query,
            prefix + "self_attn.k_proj.weight": key,
            prefix + "self_attn.v_proj.weight": value,
            prefix + "self_attn.o_proj.weight": layer.output,
            prefix + "post_attention_layernorm.weight": layer.mlp_norm,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": layer.down,
        }
    return state


@torch.inference_mode()
def generate_static(model: LlamaForCausalLM, jobs: list[Job], batch_size: int) -> list[list[int]]:
    """Sealed batches in order of arrival, padded on the left, each run to its longest member. Greedy."""
    outputs: list[list[int]] = []
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        width = max(len(job.prompt) for job in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        longest = max(job.num_output for job in batch)
        generated = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
        )
        for row, job in enumerate(batch):
            outputs.append(generated[row, width : width + job.num_output].tolist())
    return outputs
