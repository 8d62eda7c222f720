"""From a typed word to a path: the table of forms, their order, and the sentences for what is not there."""

from pathlib import Path

import pytest

from quire.catalog import locate as locate_module
from quire.catalog.locate import Located, locate
from quire.catalog.names import DEFAULT_MODEL, HubName, WheelModel
from quire.catalog.store import Report
from quire.core.errors import ConfigError, ModelNotFound


class FakeHub:
    """Remembers what it was asked, and answers with a path."""

    def __init__(self) -> None:
        self.asked: list[tuple[HubName, str | None, str | None]] = []

    def __call__(self, wanted: HubName, *, revision: str | None, token: str | None, report: Report) -> Path:
        self.asked.append((wanted, revision, token))
        return Path("hub") / wanted.repository


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: WheelModel, folder: Path, report: Report) -> Path:
        return folder / model.file_name

    monkeypatch.setattr(locate_module, "fetch", fetch)


@pytest.mark.parametrize("text", [None, "", "  ", "smollm2", " SmolLM2-135M-Instruct "])
def test_nothing_and_the_short_names_give_the_default_model(text: str | None, hub: FakeHub, cache: Path) -> None:
    found = locate(text, fetch_hub=hub, folder=cache)
    assert found == Located(cache / DEFAULT_MODEL.file_name, "gguf", DEFAULT_MODEL.name)


def test_the_cache_folder_follows_xdg_cache_home(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert locate(None, fetch_hub=hub).path.parent == tmp_path / "quire" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert locate(None, fetch_hub=hub).path.parent == tmp_path / "home" / ".cache" / "quire" / "models"


def test_a_folder_with_a_config_is_a_folder_even_beside_a_gguf(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").touch()
    (model / "extra.gguf").touch()
    assert locate(str(model), fetch_hub=hub, folder=cache) == Located(model, "folder", "my-model")


def test_a_gguf_file_and_the_folder_that_holds_only_it(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    file = model / "weights.Q4_0.GGUF"
    file.touch()
    assert locate(str(file), fetch_hub=hub, folder=cache) == Located(file, "gguf", "weights.Q4_0")
    assert locate(str(model), fetch_hub=hub, folder=cache) == Located(file, "gguf", "my-model")


def test_a_model_in_the_cache_folder_has_its_file_name_as_name(hub: FakeHub, cache: Path) -> None:
    file = cache / "Mine.gguf"
    file.touch()
    assert locate("mine", fetch_hub=hub, folder=cache) == Located(file, "gguf", "Mine")


def test_home_is_spelt_with_a_tilde(hub: FakeHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.gguf").touch()
    assert locate("~/a.gguf", fetch_hub=hub, folder=cache).path == tmp_path / "a.gguf"


def test_a_hub_id_takes_its_revision_and_token_along(hub: FakeHub, cache: Path) -> None:
    found = locate("org/name", fetch_hub=hub, revision="v1", token="secret", folder=cache)
    assert found == Located(Path("hub/org/name"), "folder", "org/name")
    assert hub.asked == [(HubName("org/name", None), "v1", "secret")]


def test_one_file_of_the_hub_is_a_gguf(hub: FakeHub, cache: Path) -> None:
    found = locate("org/name:a.gguf", fetch_hub=hub, folder=cache)
    assert (found.kind, found.name) == ("gguf", "org/name:a.gguf")
    assert hub.asked[0][0] == HubName("org/name", "a.gguf")


def test_a_folder_here_comes_before_the_hub(
    hub: FakeHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    assert locate("org/name", fetch_hub=hub, folder=cache).path == Path("org/name")
    assert hub.asked == []


@pytest.mark.parametrize("text", [None, "smollm2", "./here.gguf"])
def test_a_revision_without_a_hub_id_is_refused(text: str | None, hub: FakeHub, cache: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        locate(text, fetch_hub=hub, revision="main", folder=cache)


def test_an_unknown_name_gets_the_nearest_and_the_forms(hub: FakeHub, cache: Path) -> None:
    (cache / "mistral-mine.gguf").touch()
    with pytest.raises(ModelNotFound) as caught:
        locate("mistral-mein", fetch_hub=hub, folder=cache)
    assert "'mistral-mein'" in caught.value.message
    assert "Did you mean mistral-mine?" in caught.value.message
    assert "hub id org/name" in caught.value.message
    assert caught.value.status == 404


@pytest.mark.parametrize("text", ["./nowhere", "nowhere.gguf", "a/b/c.gguf", "/nowhere/at/all", "org/name.gguf"])
def test_a_path_that_is_not_there_is_named(text: str, hub: FakeHub, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="There is no file or folder"):
        locate(text, fetch_hub=hub, folder=cache)
    assert hub.asked == []


def test_a_path_without_a_model_is_refused_with_the_reason(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.gguf").touch()
    (tmp_path / "two" / "b.gguf").touch()
    (tmp_path / "model.safetensors").touch()
    (cache / "dangling.gguf").symlink_to(tmp_path / "gone")
    for name, reason in {
        "empty": "neither config.json nor a .gguf file",
        "two": "2 GGUF files and no config.json; name one: a.gguf, b.gguf",
        "model.safetensors": "give the folder that has config.json",
    }.items():
        with pytest.raises(ModelNotFound, match=reason):
            locate(str(tmp_path / name), fetch_hub=hub, folder=cache)


@pytest.mark.parametrize("text", ["x" * 5000, "a\0b", "~nobody-has-this-name/x", "./" + "y" * 5000])
def test_a_text_that_is_no_path_is_not_found(text: str, hub: FakeHub, cache: Path) -> None:
    with pytest.raises(ModelNotFound):
        locate(text, fetch_hub=hub, folder=cache)


def test_a_cache_folder_that_cannot_be_read_is_empty_and_other_paths_still_work(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / ("unreadable" * 30)  # root may read every folder, but nobody one with such a name
    (tmp_path / "mine.gguf").write_bytes(b"")
    assert locate(str(tmp_path / "mine.gguf"), fetch_hub=hub, folder=cache).name == "mine"
    with pytest.raises(ModelNotFound, match="There is no model 'nosuch'"):
        locate("nosuch", fetch_hub=hub, folder=cache)


def test_without_a_home_the_error_names_the_variable_to_set(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME"):
        locate(None, fetch_hub=hub)
