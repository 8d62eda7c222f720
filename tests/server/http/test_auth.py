"""API keys: found by digest, read from a file with optional identities, never shown."""

import hashlib
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ConfigError
from quire.server.http import auth as keys_module
from quire.server.http.auth import ADMIN, Identity, KeyRing, make_key_ring, read_keys

KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@given(st.lists(KEYS, min_size=1, max_size=5, unique=True), KEYS)
def test_a_key_ring_finds_exactly_its_keys(held: list[str], other: str) -> None:
    ring = KeyRing((key, Identity(f"holder-{number}")) for number, key in enumerate(held))
    for number, key in enumerate(held):
        assert ring.find(key.encode()) == Identity(f"holder-{number}")
    assert (ring.find(other.encode()) is None) == (other not in held)


@pytest.mark.parametrize("shown", [b"first", b"second", b"third", b"none of them"])
def test_every_digest_is_compared_whichever_matches(shown: bytes) -> None:
    ring = make_key_ring(["first", "second", "third"])
    with patch.object(keys_module.secrets, "compare_digest", wraps=keys_module.secrets.compare_digest) as compared:
        ring.find(shown)
    digest = hashlib.sha256(shown).digest()
    assert [call.args[1] for call in compared.call_args_list] == [digest] * 3


def test_a_key_ring_shows_no_key() -> None:
    ring = make_key_ring(["sk-secret"], admin_key="sk-admin")
    kept = [ring._identities, ring, str(ring)]
    assert not [each for each in kept if "sk-" in repr(each)]


def test_a_server_without_keys_is_open_also_with_an_admin_key() -> None:
    assert make_key_ring([]).open and not make_key_ring([]).has_admin
    admins = make_key_ring([], admin_key="a")
    assert admins.open and admins.has_admin and admins.find(b"a") == ADMIN
    assert not make_key_ring(["k"]).open and not make_key_ring(["k"]).has_admin


def written(folder: Path, text: str) -> Path:
    file = folder / "keys"
    file.write_text(text)
    return file


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "# keys of this server\n\nsk-plain\n  sk-batch name=batch weight=0.5 max_open=8\nsk-batch-2 max_open=8 "
        "name=batch weight=0.5\nsk-ops trusted name=ops\n",
    )
    batch = Identity("batch", 0.5, max_open=8)
    plain, ops = Identity("key-2"), Identity("ops", trusted=True)
    assert read_keys(file, first_number=2) == [
        ("sk-plain", plain), ("sk-batch", batch), ("sk-batch-2", batch), ("sk-ops", ops),
    ]  # fmt: skip
    ring = make_key_ring(["sk-given"], file)
    assert ring.find(b"sk-given") == Identity("key-1") and ring.find(b"sk-plain") == plain


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no key"),
        ("# only this\n", "has no key"),
        ("sk-secret a\n", "line 1"),
        ("sk-ok\n\nsk-secret color=red\n", "line 3"),
        ("sk-secret weight=heavy\n", "numbers"),
        ("sk-secret weight=0\n", "above 0"),
        ("sk-secret weight=nan\n", "above 0"),
        ("sk-secret weight=inf\n", "at most 1000"),
        ("sk-secret max_open=0\n", "at least 1"),
        ("sk-secret max_open=1 max_open=2\n", "each at most once"),
        ("sk-secret trusted=no\n", "each at most once"),
        ("sk-secret name=a/b\n", "letters"),
        ("sk-secret name=\n", "letters"),
        ("sk-secret name=anonymous\n", "without a key"),
        ("sk-secret name=a\nsk-other name=a weight=2\n", "must agree"),
        ("sk-secret\nsk-secret name=again\n", "given twice"),
        ("sk-secret-é\n", "ASCII"),
        ("x" * 513, "512"),
    ],
)
def test_an_invalid_key_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_key_ring([], written(tmp_path, text))
    assert words in refused.value.message
    assert "sk-" not in refused.value.message and "xxx" not in refused.value.message


@pytest.mark.parametrize("key", ["", " ", "a b", "é", "a\n"])
def test_invalid_keys_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="visible ASCII"):
        make_key_ring([key])


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        make_key_ring([], tmp_path / "nothing")


def test_a_file_of_admin_keys(tmp_path: Path) -> None:
    file = written(tmp_path, "# ours\nsk-admin\n\nsk-admin-next\n")
    ring = make_key_ring([], admin_key="sk-given", admin_file=file)
    assert [ring.find(key) for key in (b"sk-admin", b"sk-admin-next", b"sk-given")] == [ADMIN] * 3
    assert ring.open and not make_key_ring(["sk-served"], admin_file=file).open


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no key"),
        ("sk-a\nsk-secret name=ops\n", "line 2: options are not allowed"),
        ("sk-\u00e9", "not plain ASCII"),
    ],
)
def test_an_invalid_file_of_admin_keys_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        make_key_ring([], admin_file=written(tmp_path, text))
    assert refused.value.param == "admin_key_file" and "sk-" not in refused.value.message
