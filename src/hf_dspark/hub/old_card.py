"""What the card that is there already says: facts that no file of the checkpoint holds, and what its owner added."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, metadata_load

from ..models.configuration_drafter import NAMES
from .card_results import is_ours
from .escaping import one_line
from .names import is_repo_id
from .regions import read_header, was_edited


OWN_TAGS = ("speculative-decoding", "hf-dspark", "custom_generate", *NAMES)
_REPLACE = "or replace it with force=True (--force)."


def read_old_card(file: Path, force: bool) -> ModelCard | None:
    """
    The card that a new one replaces.

    Args:
        file (`Path`): Where it would be.
        force (`bool`): Whether one that was not made here, was edited outside its regions or can't be read is given
            up.

    Raises:
        FileExistsError: If it would be lost.
        ValueError: If it can't be read.
    """
    if not file.is_file():
        return None
    try:
        card = _read(file)
    except ValueError:
        if force:
            return None
        raise
    if force:
        return card
    if read_header(card.content) is None:
        raise FileExistsError(
            f"The {file.name} that is there was not made by hf-dspark, and its text would be lost. Move it away, run "
            "this again, and put what you want to keep into a region of the new card; "
            f"{_REPLACE}"
        )
    if was_edited(card.text):
        raise FileExistsError(
            f"The {file.name} that is there was edited outside its regions, and that would be lost. Move it between "
            f"`by hand` and `end of`, {_REPLACE}"
        )
    return card


def _read(file: Path) -> ModelCard:
    name = file.name
    try:
        card = ModelCard(file.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{name} is no UTF-8 text. Save it as UTF-8, {_REPLACE}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 2}" if mark else ""
        told = one_line(getattr(error, "problem", None) or error)
        raise ValueError(f"{name}: its metadata is no YAML{line}: {told}. Correct it, {_REPLACE}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: its metadata can't be read: {one_line(error)} Correct it, {_REPLACE}") from None
    index = metadata_load(file) or {}
    if len(index.get("model-index") or []) > 1:
        raise ValueError(f"{name}: `model-index` holds more than one model. Leave one of them, {_REPLACE}")
    return card


def known_facts(card: ModelCard, own: dict[str, Any]) -> dict[str, Any]:
    """
    Arguments of `CardFacts` that a card tells. What was taken from the checkpoint is taken from there anew.

    Args:
        card (`ModelCard`): The card.
        own (`dict`): What the checkpoint says now: `base_model` and `datasets`.
    """
    header, data = read_header(card.content) or {}, card.data
    was = header.get("derived") or {}
    base, languages = data.get("base_model"), _listed(data.get("language"))
    taken = base == was["base_model"] if "base_model" in was else bool(own["base_model"])
    return {
        "repo_id": header.get("repo_id"),
        "thinking": header.get("thinking"),
        "base_model": None if taken or isinstance(base, list) else base,
        "license": data.get("license"),
        # YAML reads the language code of Norwegian as a truth value.
        "languages": ["no" if language is False else language for language in languages],
        "datasets": [name for name in _listed(data.get("datasets")) if name not in (was.get("datasets") or [])],
        "tags": [tag for tag in _listed(data.get("tags")) if tag not in OWN_TAGS],
    }


def base_models(card: ModelCard | None) -> list[str] | None:
    """
    Several base models, which only a person writes into a card.

    Raises:
        ValueError: If one is no Hub id.
    """
    names = card.data.get("base_model") if card else None
    if not isinstance(names, list):
        return None
    for name in names:
        if not isinstance(name, str) or not is_repo_id(name):
            raise ValueError(f"README.md: `base_model`: {one_line(name)!r} is no Hub id. Write owner/name.")
    return names


def results_by_hand(card: ModelCard | None) -> list[EvalResult]:
    """The card's results that no evaluation of ours has written."""
    return [result for result in (card.data.get("eval_results") or [] if card else []) if not is_ours(result)]


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
