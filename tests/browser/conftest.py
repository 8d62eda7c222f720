"""One browser for all tests; each test has tabs with an empty storage."""

from collections.abc import Iterator

import pytest

from tests.browser.chromium import PROGRAM, Chromium, chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PROGRAM is None:
        skip = pytest.mark.skip(reason="no Chromium here: install the package chromium")
        for item in items:
            if "tests/browser" in item.path.as_posix():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
