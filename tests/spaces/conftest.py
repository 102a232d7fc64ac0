"""The Space's modules, importable, and pairs for its page."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


SPACE = Path(__file__).resolve().parents[2] / "spaces" / "dspark-demo"
sys.path.append(str(SPACE))


@pytest.fixture(scope="session")
def small_pair(tiny_pair, tiny_tokenizer):
    """The tiny pair as the Space holds it."""
    from pairs import Pair
    from transformers import AutoModelForCausalLM

    from hf_dspark import AutoDrafter

    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0]).eval()
    drafter = AutoDrafter.from_pretrained(tiny_pair[1]).eval().attach(target)
    return Pair(target, drafter, tiny_tokenizer, "tiny/target", "tiny/drafter")


@pytest.fixture(scope="session")
def place_in_cache() -> Callable[[Path, str, Path], None]:
    """Puts a folder into a cache as if it came from the Hub."""

    def place(cache: Path, repo_id: str, folder: Path) -> None:
        repository = cache / f"models--{repo_id.replace('/', '--')}"
        shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)

    return place


@pytest.fixture(scope="session")
def tiny_hub(tmp_path_factory, tiny_pair, place_in_cache) -> Path:
    """A cache with the tiny pair as `tiny/target` and `tiny/drafter`."""
    cache = tmp_path_factory.mktemp("hub")
    for name, folder in zip(("target", "drafter"), tiny_pair):
        place_in_cache(cache, f"tiny/{name}", folder)
    return cache
