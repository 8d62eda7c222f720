"""From the name of a model to its file, its tokenizer and its end tokens. Loads no weights and needs no torch."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from quire.catalog.locate import Located, locate
from quire.catalog.names import HubName, short_name
from quire.catalog.store import Report, ignore
from quire.config import EngineConfig
from quire.core.errors import BrokenModelFile, ConfigError, InvalidParameter, ModelNotFound, shown
from quire.core.model import ModelSpec
from quire.core.sampling import SamplingParams
from quire.core.sharding import check_divisible, check_stages
from quire.core.speculative import parse_sources
from quire.engine.resolved_config import check_length
from quire.formats.checkpoint import Checkpoint, CheckpointSource, GenerationDefaults
from quire.formats.draft_head import DUMMY_HEAD, DraftHeadCheckpoint, dummy_head, open_eagle_head, open_mtp_layer
from quire.formats.hf_folder import GENERATION_CONFIG, open_folder
from quire.formats.presets import dummy_checkpoint
from quire.text.tokenizer import Tokenizer


@dataclass
class OpenedModel:
    """A model that was found."""

    name: str
    checkpoint: Checkpoint
    draft: Checkpoint | DraftHeadCheckpoint | None = None  # the draft model, or the head, that the settings name

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None: the model takes token ids, and refuses text."""
        return open_tokenizer(self.checkpoint)

    @property
    def has_tokenizer(self) -> bool:
        """Without reading it."""
        return self.tokenizer is not None if "tokenizer" in vars(self) else _has_tokenizer(self.checkpoint)

    @property
    def end_ids(self) -> tuple[int, ...]:
        if self.checkpoint.end_ids or self.tokenizer is None:
            return self.checkpoint.end_ids
        return tuple(self.tokenizer.end_ids)

    @property
    def default_params(self) -> SamplingParams:
        return default_params(self.checkpoint)


def default_params(checkpoint: Checkpoint) -> SamplingParams:
    """The sampling defaults of the model's generation config; the library's defaults where it has none."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    said = {name: getattr(checkpoint.defaults, name) for name in names}
    try:
        return SamplingParams(**{name: value for name, value in said.items() if value is not None})
    except InvalidParameter as error:
        raise BrokenModelFile(
            f"{checkpoint.path / GENERATION_CONFIG} contains an invalid value: {error.message} Correct or remove it."
        ) from error


def open_model(
    config: EngineConfig,
    fetching: Report = ignore,
    *,
    scripted: bool = False,
    found: Callable[[], object] = lambda: None,
    reads_tokenizer: bool = True,
) -> OpenedModel:
    """Find the model, and fetch it if it must be. A scripted one has no positions to run out of. `found` is called
    when nothing but the tokenizer, and the draft model, can be refused any more. The tokenizer is read here, which
    refuses a broken one, or at its first use."""
    name, checkpoint = find_checkpoint(config, fetching)
    if not scripted:
        check_length(config, checkpoint.spec)
        _check_ranks(config, checkpoint.spec)
    default_params(checkpoint)  # checked here: otherwise a request would be refused for values that it did not send
    found()
    opened = OpenedModel(name, checkpoint)
    if reads_tokenizer:
        opened.tokenizer  # noqa: B018  # kept
    if not scripted:
        opened.draft = _open_draft(config, opened, fetching)
    return opened


def _open_draft(config: EngineConfig, opened: OpenedModel, fetching: Report) -> Checkpoint | DraftHeadCheckpoint | None:
    """The draft model or head, if the settings name one. A draft model must have the tokens of the model."""
    _, wanted, kind = parse_sources(config.speculative)
    if wanted is None:
        return None
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"speculative is {config.speculative}, and tensor_parallel_size is {config.tensor_parallel_size}: a draft "
            f"model runs beside a model in one process only. Use --tensor-parallel-size 1, or --speculative auto.",
            param="speculative",
        )
    if kind == "mtp":
        return open_mtp_layer(opened.checkpoint, opened.name, config.speculative)
    if kind == "eagle" and wanted == DUMMY_HEAD and opened.checkpoint.source is CheckpointSource.DUMMY:
        return dummy_head(opened.checkpoint.spec)
    if kind == "eagle":
        return _open_head(config, wanted, opened, fetching)
    name, checkpoint = find_checkpoint(replace(config, model=wanted, revision=None), fetching)
    tokenizer = open_tokenizer(checkpoint)
    if tokenizer is None or opened.tokenizer is None:
        sizes = checkpoint.spec.vocab_size, opened.checkpoint.spec.vocab_size
        if sizes[0] == sizes[1]:
            return checkpoint
        difference = f"it has {sizes[0]} tokens, and {opened.name} has {sizes[1]}"
    else:
        number = opened.tokenizer.first_difference(tokenizer)
        if number is None:
            return checkpoint
        theirs, ours = (shown(each.id_to_piece(number)) for each in (tokenizer, opened.tokenizer))
        difference = f"token {number} is {theirs} there and {ours} in {opened.name}"
    raise ConfigError(
        f"The draft model {name} has another tokenizer: {difference}. Use a smaller model of the same family, or "
        f"--speculative auto.",
        param="speculative",
    )


def _open_head(config: EngineConfig, wanted: str, opened: OpenedModel, fetching: Report) -> DraftHeadCheckpoint:
    located = locate(wanted, fetch_hub=_fetch_hub, revision=None, token=config.token, report=fetching)
    if located.kind != "folder":
        raise ConfigError(
            f"speculative is {config.speculative}, and {located.path} is a file: an EAGLE-3 head is a folder with "
            f"config.json and model.safetensors.",
            param="speculative",
        )
    return open_eagle_head(located.path, opened.checkpoint.spec, opened.name)


def _check_ranks(config: EngineConfig, spec: ModelSpec) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size, flag = getattr(config, name), "--" + name.replace("_", "-")
        if size > 1 and sys.platform != "linux":
            raise ConfigError(f"{name} is {size}, which needs Linux. Use {flag} 1.", param=name)
    if config.device == "cuda":
        refuse_stages_on_gpus(config)
    check_divisible(spec, config.tensor_parallel_size)
    check_stages(spec, config.pipeline_parallel_size)
    if config.pipeline_parallel_size > 1 and config.speculative != "off":
        raise ConfigError(
            f"pipeline_parallel_size is {config.pipeline_parallel_size} and speculative is {config.speculative}: the "
            f"first stage cannot verify drafts that only the last one can propose. Use --speculative off, or "
            f"--tensor-parallel-size instead.",
            param="speculative",
        )


def refuse_stages_on_gpus(config: EngineConfig) -> None:
    size = config.pipeline_parallel_size
    if size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {size}, and the device is a GPU: so far, pipeline stages are for CPUs. Use "
            f"--tensor-parallel-size {size * config.tensor_parallel_size} instead, or --device cpu.",
            param="pipeline_parallel_size",
        )


def find_checkpoint(config: EngineConfig, fetching: Report = ignore) -> tuple[str, Checkpoint]:
    if config.load_format == "dummy":
        if config.model is None:
            raise ModelNotFound("Dummy weights need the name of a shape, e.g. qwen3-0.6b.", param="model")
        return config.model, dummy_checkpoint(config.model)
    located = locate(config.model, fetch_hub=_fetch_hub, revision=config.revision, token=config.token, report=fetching)
    return located.name, open_located(located)


def open_located(located: Located) -> Checkpoint:
    """The metadata of a model's files. One of the catalog has the sampling defaults that the catalog gives."""
    if located.kind == "folder":
        return open_folder(located.path)
    from quire.formats.open_checkpoint import open_checkpoint  # gguf is imported only for GGUF files

    checkpoint, known = open_checkpoint(located.path), short_name(located.name)
    if known is None:
        return checkpoint
    return replace(checkpoint, defaults=GenerationDefaults(known.temperature, known.top_p))


def _fetch_hub(wanted: HubName, *, revision: str | None, token: str | None, report: Report) -> Path:
    from quire.catalog.hub import fetch  # the hub's client takes longer to load than the rest of a server's front

    return fetch(wanted, revision=revision, token=token, report=report)


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    match checkpoint.source:
        case CheckpointSource.FOLDER:
            return (checkpoint.path / "tokenizer.json").is_file()
        case CheckpointSource.GGUF:
            return True
        case CheckpointSource.DUMMY:
            return False


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer of a model; None where there is none."""
    match checkpoint.source:
        case CheckpointSource.FOLDER:
            return Tokenizer.from_folder(checkpoint.path) if _has_tokenizer(checkpoint) else None
        case CheckpointSource.GGUF:
            return Tokenizer.from_gguf(checkpoint.metadata)
        case CheckpointSource.DUMMY:
            return None
