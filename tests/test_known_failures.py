"""docs/known-failures.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_named_test_exists() -> None:
    text = (TESTS.parent / "docs/known-failures.md").read_text()
    file, named = None, 0
    for path, function in re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", text):
        file = TESTS / path if path else file
        assert file is not None
        assert f"def {function}(" in file.read_text(), (file, function)
        named += 1
    assert named > 30
