"""Targets and their drafters: the Space's own pair, and those that visitors name."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from chat_template import ChatTemplate
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import HFValidationError, filter_repo_objects, validate_repo_id
from settings import Settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dspark import AutoDrafter
from hf_dspark.generation.profile import stored_profile
from hf_dspark.hub import embedded_drafter, embedded_target


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Data only: no pickles, and no code, which nothing here would run anyway.
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
NOT_FILES = ["adapter_*", "*/*"]  # an adapter would name a third repository to load
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # one of these has the vocabulary
DATA_ONLY = {"use_safetensors": True, "trust_remote_code": False}
EMBEDDED_NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "the drafter that comes with hf-dspark")
# Errors whose text says in words what is wrong, for whoever named the model.
TELLING = (ValueError, OSError, ImportError, RuntimeError)
PATH = re.compile(r"(?<![\w:/])(?:/[^\s/'\"]+){2,}/?")
KEPT = 2  # pairs of visitors in memory at a time, beside the Space's own


class PairError(ValueError):
    """A pair that can't be loaded, in words for the visitor who asked for it."""


@dataclass(eq=False)
class Pair:
    """
    A target with its drafter, shared by everyone: neither keeps any state between calls. The chat template of a
    visitor's target is `chat_template`'s to run.
    """

    target: PreTrainedModel
    drafter: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    target_name: str
    drafter_name: str
    chat_template: ChatTemplate | None = None

    @property
    def num_drafts(self) -> int:
        return self.drafter.num_drafts

    @property
    def is_measured(self) -> bool:
        """Whether this machine's speed with the pair is on record, as the throughput schedule needs it."""
        return stored_profile(self.target, self.drafter) is not None

    @property
    def place(self) -> str:
        """Where and in which number type the target runs, in words."""
        device = "a GPU" if self.target.device.type == "cuda" else "a CPU"
        return f"{str(self.target.dtype).removeprefix('torch.')} on {device}"


class Pairs:
    """
    Loads pairs, and keeps the Space's own and the last few that visitors had loaded.

    Args:
        settings (`Settings`): The Space's settings.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self._loading = threading.Lock()  # one at a time, and two visitors who ask for one pair get it loaded once
        self._named: dict[tuple[str, str], Pair] = {}
        self.own = self._load_own()

    def get(self, key: tuple[str, str] | None) -> Pair:
        """The pair that a visitor loaded, loaded again if it had to go; the Space's own for `None`."""
        return self.own if key is None else self.load(*key)

    def load(self, target_id: str, drafter_id: str) -> Pair:
        """
        Load a visitor's pair from the Hub, as anyone without an account could.

        Args:
            target_id (`str`): The target's Hub id; if empty, the one that the drafter names.
            drafter_id (`str`): The drafter's Hub id.

        Raises:
            PairError: If the ids, the repositories or their contents won't do.
        """
        if not self._settings.download_limit_gb:
            raise PairError("This Space shows its own pair only. Duplicate it to try others.")
        target_id, drafter_id = target_id.strip(), drafter_id.strip()
        _check_id(drafter_id, "drafter")
        if target_id:
            _check_id(target_id, "target")
        key = (target_id, drafter_id)
        if pair := self._named.get(key):  # who has a pair does not wait for those who load one
            return pair
        with self._loading:
            if key not in self._named:
                pair = self._load_named(*key)
                self._named = dict([*self._named.items(), (key, pair)][-KEPT:])
            return self._named[key]

    def _load_own(self) -> Pair:
        if not self._settings.drafter:
            drafter = _load_drafter(embedded_drafter())
            return _joined(*self._load_target(embedded_target()), drafter, EMBEDDED_NAMES)
        drafter = _load_drafter(self._settings.drafter)
        target = self._settings.target or _named_target(drafter)
        return _joined(*self._load_target(target), drafter, (target, self._settings.drafter))

    def _load_named(self, target_id: str, drafter_id: str) -> Pair:
        folder = self._fetch(drafter_id, "drafter")
        with _told(f"The drafter {drafter_id} can't be loaded.", folder, drafter_id):
            drafter = _load_drafter(folder)
        target_id = target_id or _named_target(drafter)
        _check_id(target_id, "target")
        folder = self._fetch(target_id, "target")
        with _told(f"The target {target_id} can't be loaded.", folder, target_id):
            if not any((folder / name).is_file() for name in TOKENIZERS):
                raise ValueError("It has no tokenizer.")
            target, tokenizer = self._load_target(folder)
        with _told("This pair can't be loaded.", folder, target_id):
            pair = _joined(target, tokenizer, drafter, (target_id, drafter_id))
            if tokenizer.chat_template is not None:
                pair.chat_template = ChatTemplate(tokenizer, target_id)
            return pair

    def _load_target(self, source: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = self._settings.dtype
        if dtype == "auto" and device == "cpu":
            dtype = "float32"
        target = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **DATA_ONLY)
        return target.to(device).eval(), AutoTokenizer.from_pretrained(source, trust_remote_code=False)

    def _fetch(self, repo_id: str, what: str) -> Path:
        """Download a visitor's repository; always through the Hub, so that no id can name a folder of this machine."""
        try:
            if not constants.HF_HUB_OFFLINE:
                # Without the Space's token: visitors must not read its owner's private repositories.
                info = HfApi(token=False).model_info(repo_id, files_metadata=True, timeout=20)
                self._check_size(info, what)
            return Path(snapshot_download(repo_id, allow_patterns=FILES, ignore_patterns=NOT_FILES, token=False))
        except GatedRepoError as error:
            raise PairError(
                f"The {what} {repo_id} is gated: it asks for an account, and this page has none."
            ) from error
        except RepositoryNotFoundError as error:
            raise PairError(f"There is no public model {repo_id} on the Hub (asked for as the {what}).") from error
        except LocalEntryNotFoundError as error:
            raise PairError(f"The {what} {repo_id} can't be had: the Hub does not answer from here.") from error
        except PairError:
            raise
        except Exception as error:  # the network's too, which has kinds of its own
            raise PairError(f"The Hub did not give out the {what} {repo_id}. {_reason(error)}") from error

    def _check_size(self, info, what: str) -> None:
        files = filter_repo_objects(
            info.siblings, allow_patterns=FILES, ignore_patterns=NOT_FILES, key=lambda file: file.rfilename
        )
        size = sum(file.size or 0 for file in files) / 1e9
        limit = self._settings.download_limit_gb
        if size > limit:
            raise PairError(
                f"The {what} {info.id} has {size:.1f} GB, and this Space takes {limit:g} GB. Duplicate the Space on "
                "larger hardware to try it."
            )


def _check_id(repo_id: str, what: str) -> None:
    if not repo_id:
        raise PairError(f"Name the {what}: its id on the Hub, like user/model.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        repo_id = _shortened(repo_id, 60)
        raise PairError(f"“{repo_id}” is no Hub id. The {what}'s id looks like user/model.") from None


def _joined(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: PreTrainedModel, names: tuple[str, str]
) -> Pair:
    return Pair(target, drafter.to(target.device, target.dtype).attach(target), tokenizer, *names)


def _load_drafter(source: str | Path) -> PreTrainedModel:
    return AutoDrafter.from_pretrained(source).eval()


def _named_target(drafter: PreTrainedModel) -> str:
    target = drafter.config.target_name_or_path
    if not target or not isinstance(target, str):
        raise PairError("The drafter does not say which target it was made for. Name the target too.")
    return target


@contextmanager
def _told(what: str, folder: Path, repo_id: str) -> Iterator[None]:
    """Whatever goes wrong with a stranger's files reaches the visitor in words, with the id in place of the folder."""
    try:
        yield
    except Exception as error:
        raise PairError(f"{what} {_reason(error, folder, repo_id)}") from error


def _reason(error: Exception, folder: Path | None = None, repo_id: str = "") -> str:
    reason = str(error) if isinstance(error, TELLING) else ""
    reason = reason or f"Its files are damaged or not what they should be ({type(error).__name__}: {error})."
    if folder is not None:
        reason = reason.replace(str(folder), repo_id)
    return _shortened(PATH.sub("…", reason))


def _shortened(text: str, length: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"
