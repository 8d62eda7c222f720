"""Models small enough for tests, as a user has them: a folder with weights, tokenizer and chat template."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

SPECIAL = ("<unk>", "<s>", "</s>")
END = SPECIAL.index("</s>")
FIRST_BYTE = len(SPECIAL)
VOCAB = FIRST_BYTE + 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def byte_ids(text: str) -> list[int]:
    """Token ids of a text by `write_tokenizer`, if its vocabulary has all bytes."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself if printable, else the next free one from U+0100 on."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    borrowed = iter(sorted(letter for letter in letters if ord(letter) >= 0x100))
    return [chr(byte) if chr(byte) in letters else next(borrowed) for byte in range(256)]


def write_tokenizer(folder: Path, num_tokens: int = VOCAB) -> None:
    """One token per byte, in order, after the special tokens; up to `num_tokens`."""
    pieces = [*SPECIAL, *byte_letters()][:num_tokens]
    backend = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, model: PreTrainedModel, num_tokens: int = VOCAB) -> Path:
    model.save_pretrained(folder)
    write_tokenizer(folder, num_tokens)
    return folder


def tiny_llama(vocab_size: int = VOCAB, seed: int = 0) -> LlamaForCausalLM:
    """Random weights, large enough for widely spread logits."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=END,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= 4
    return model
