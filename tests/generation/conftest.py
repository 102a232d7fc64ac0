"""What tests of decoding share."""

import pytest
from conftest import make_target


@pytest.fixture(scope="module")
def target():
    """Random, and its greedy output varied."""
    return make_target("llama", 3)
