"""The hub's cache first, then its network; every refusal says what to do. No test here reaches a network."""

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quire.catalog import hub
from quire.catalog.locate import missing_files
from quire.catalog.names import DEFAULT_MODEL, HubName
from quire.catalog.store import FetchPhase, FetchProgress, ignore
from quire.cli.models import ModelState, entries
from quire.core.errors import ConfigError, FetchFailed, ModelNotFound, QuireError, UnsupportedModel

NAME = HubName("org/name", None)


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"{}")
    return folder


class FakeDownload:
    """Stands in for `snapshot_download`: a folder in the cache, another from the network, or an error."""

    def __init__(self, cached: Path | None, remote: Path | Exception) -> None:
        self.cached = cached
        self.remote = remote
        self.calls: list[dict[str, object]] = []

    def __call__(self, repository: str, **options: object) -> str:
        self.calls.append({"repository": repository, **options})
        if options["local_files_only"]:
            if self.cached is None:
                raise LocalEntryNotFoundError("not cached")
            return str(self.cached)
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


def install(monkeypatch: pytest.MonkeyPatch, download: FakeDownload) -> FakeDownload:
    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "list_files", lambda repository, revision, token: [])
    return download


@pytest.mark.parametrize("token", ["hf_é", "hf_a\nb"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="characters that a header cannot carry"):
        hub.fetch(NAME, revision=None, token=token, report=ignore)


def test_a_whole_model_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = fill(tmp_path / "cached", "config.json", "tokenizer.json", "model.safetensors")
    download = install(monkeypatch, FakeDownload(cached, AssertionError("went to the network")))
    assert hub.fetch(NAME, revision=None, token=None, report=ignore) == cached
    assert [call["local_files_only"] for call in download.calls] == [True]


def test_a_half_model_in_the_cache_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = fill(tmp_path / "cached", "config.json", "tokenizer.json")
    remote = fill(tmp_path / "remote", "config.json", "tokenizer.json", "model.safetensors")
    download = install(monkeypatch, FakeDownload(cached, remote))
    assert hub.fetch(NAME, revision="v1", token="secret", report=ignore) == remote
    assert (download.calls[1]["revision"], download.calls[1]["token"]) == ("v1", "secret")


def test_only_weights_settings_and_tokenizers_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = fill(tmp_path / "remote", "config.json", "tokenizer.json", "model.safetensors")
    download = install(monkeypatch, FakeDownload(None, remote))
    hub.fetch(NAME, revision=None, token=None, report=ignore)
    patterns = download.calls[-1]["allow_patterns"]
    assert isinstance(patterns, list)
    assert not [pattern for pattern in patterns if pattern.endswith((".py", ".bin", ".pt", ".pth", "*"))]


def test_only_the_named_gguf_file_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = fill(tmp_path / "remote", "a.gguf")
    download = install(monkeypatch, FakeDownload(None, remote))
    found = hub.fetch(HubName("org/name", "a.gguf"), revision=None, token=None, report=ignore)
    assert found == remote / "a.gguf"
    assert download.calls[-1]["allow_patterns"] == ["a.gguf"]


def http_error(kind: type[Exception]) -> Exception:
    """These want a response, which no test has."""
    error = kind.__new__(kind)
    error.args = ("the hub says no",)
    return error


@pytest.mark.parametrize(
    ("error", "raised", "advice"),
    [
        (http_error(GatedRepoError), FetchFailed, "accept its licence.*--token"),
        (http_error(RepositoryNotFoundError), ModelNotFound, "no model org/name, or it is private"),
        (http_error(RevisionNotFoundError), ModelNotFound, "no revision v9"),
        (HFValidationError("bad name"), ModelNotFound, "is not a hub id: bad name"),
        (LocalEntryNotFoundError("no route"), FetchFailed, "could not be fetched .no route.*give its path"),
        (ConnectionError("reset"), FetchFailed, "could not be fetched .reset"),
        (RuntimeError(), FetchFailed, "could not be fetched .RuntimeError"),
    ],
)
def test_every_refusal_has_a_remedy(
    error: Exception, raised: type[QuireError], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeDownload(None, error))
    with pytest.raises(raised, match=advice):
        hub.fetch(NAME, revision="v9", token=None, report=ignore)


def test_a_model_without_safetensors_is_refused_with_the_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeDownload(None, fill(tmp_path / "remote", "config.json", "tokenizer.json")))
    with pytest.raises(UnsupportedModel, match=r"lacks model\.safetensors"):
        hub.fetch(NAME, revision=None, token=None, report=ignore)
    with pytest.raises(ModelNotFound, match=r"has no file b\.gguf"):
        hub.fetch(HubName("org/name", "b.gguf"), revision=None, token=None, report=ignore)


def test_an_adapter_is_refused_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = fill(tmp_path / "remote", "adapter_config.json", "adapter_model.safetensors")
    install(monkeypatch, FakeDownload(None, remote))
    with pytest.raises(UnsupportedModel, match="is an adapter"):
        hub.fetch(NAME, revision=None, token=None, report=ignore)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "model", "config.json", "tokenizer.json", "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_files(folder) == ["two.safetensors"]
    (folder / "model.safetensors.index.json").write_text("[]")
    assert missing_files(folder) == ["model.safetensors.index.json"]


def test_the_hub_reports_bytes_and_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[FetchProgress] = []
    bar_type = hub._reporting_bar(seen.append)
    files = bar_type(total=2, desc="Fetching 2 files")
    first = bar_type(total=100, unit="B", unit_scale=True)
    second = bar_type(total=100, unit="B", unit_scale=True)
    for bar in (first, second, files):
        bar.update(40)
    first.update(60)
    assert seen == [
        FetchProgress(FetchPhase.DOWNLOADING, 40, 100),
        FetchProgress(FetchPhase.DOWNLOADING, 100, 100),
    ]
    assert capfd.readouterr() == ("", "")


def test_the_list_holds_short_names_the_folder_and_the_hubs_cache(tmp_path: Path) -> None:
    folder = fill(tmp_path / "models", "mine.gguf", "notes.txt", ".lock")
    snapshots = tmp_path / "hub" / "models--org--name" / "snapshots"
    fill(snapshots / ("a" * 40), "config.json", "tokenizer.json", "model.safetensors", "extra.gguf")
    fill(tmp_path / "hub" / "models--org--half" / "snapshots" / ("b" * 40), "config.json")

    listed = {entry.name: entry for entry in entries(folder, tmp_path / "hub")}

    assert list(listed) == [DEFAULT_MODEL.name, "mine", "org/name", "org/name:extra.gguf"]
    assert listed[DEFAULT_MODEL.name].state is ModelState.ABSENT
    assert listed[DEFAULT_MODEL.name].license == "Apache-2.0"
    assert listed["mine"] == ("mine", folder / "mine.gguf", 2, ModelState.PRESENT, None)
    assert listed["org/name"].size_bytes == 2


def test_the_list_needs_neither_folder(tmp_path: Path) -> None:
    for none, no_hub in (("none", "no-hub"), ("unreadable" * 30, "unreadable" * 30)):
        listed = entries(tmp_path / none, tmp_path / no_hub)
        assert [entry.state for entry in listed] == [ModelState.ABSENT]
