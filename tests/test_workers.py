"""How the tests are shared among workers."""

import pytest


def test_a_file_is_one_workers(request: pytest.FixtureRequest) -> None:
    """Else each worker makes a file's fixtures anew; pytest-xdist 3.8 shares single tests out under pytest 9.2."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("needs --dist loadgroup, as `make test` has it")
    assert request.node.nodeid.endswith("@tests/test_workers.py")
