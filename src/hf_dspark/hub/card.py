"""A drafter's model card, made from the files beside it: facts, and what is missing said to be missing."""

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoints.engines import servings
from ..evaluation.results import RESULTS_FILE, read_results, write_results
from ..models.adapters import refuse_adapter_folder
from ..models.configuration_drafter import NAMES
from ..models.drafter import Drafter
from ..models.loading import longest_trained
from . import card_results
from .card_facts import MISSING, drafter_table, settings_table, training_facts
from .escaping import markdown, one_line
from .names import hub_id, is_repo_id, short_name, without_paths
from .regions import add_header, read_header, read_regions, render_regions, was_edited


CARD = "README.md"
TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
PLOTS, LOSS_PLOT = "plots", "plots/training_loss.png"

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_PLAIN = re.compile(r"[\w./-]{1,200}", re.ASCII)
PAPERS = {
    "dspark": ("DSpark", "2607.05147"),
    "dflash": ("DFlash", "2602.06036"),
    "eagle3": ("EAGLE-3", "2503.01840"),
}


@dataclass
class CardFacts:
    """
    What a card says and no file of the checkpoint holds. What is not given is taken from the card that is there
    already, else said to be missing.

    Args:
        repo_id (`str`, *optional*): The Hub repository, `"owner/name"`.
        base_model (`str`, *optional*): Hub id of the target; the one that the checkpoint names by default.
        license (`str`, *optional*): The Hub's identifier, such as `"apache-2.0"`.
        languages (`str` or `list[str]`, *optional*): Language codes, such as `"en"`.
        datasets (`str` or `list[str]`, *optional*): Hub ids of the datasets that it was trained on.
        tags (`str` or `list[str]`, *optional*): Further tags.
        thinking (`bool`, *optional*): Whether thinking mode was on in training, where the record doesn't say.

    Raises:
        ValueError: If one of them is nothing that the Hub takes.
    """

    repo_id: str | None = None
    base_model: str | None = None
    license: str | None = None
    languages: list[str] | str | None = None
    datasets: list[str] | str | None = None
    tags: list[str] | str | None = None
    thinking: bool | None = None

    def __post_init__(self) -> None:
        for name in ("languages", "datasets", "tags"):
            value = getattr(self, name)
            setattr(self, name, [value] if isinstance(value, str) else list(value or []))
        for name in (self.repo_id, self.base_model, *self.datasets):
            if name is not None and not is_repo_id(name):
                raise ValueError(f"{one_line(name)!r} is no Hub id. Write owner/name.")
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise ValueError(
                f"{one_line(self.license)!r} is no licence identifier of the Hub, such as apache-2.0; they are listed "
                "at https://huggingface.co/docs/hub/repositories-licenses."
            )
        for language in self.languages:
            if not _LANGUAGE.fullmatch(language):
                raise ValueError(f"{one_line(language)!r} is no language code. Write en, de, zh, code, ...")


def make_card(
    folder: str | os.PathLike,
    facts: CardFacts | None = None,
    force: bool = False,
    drafter: Drafter | None = None,
) -> ModelCard:
    """
    Makes the card of a drafter's folder; nothing is written.

    Args:
        folder (`str`): The drafter's folder. Beside the checkpoint it may hold `training_record.json` (written by
            `DraftTrainer`), `results.json` (by `hf-dspark evaluate`), plots and an earlier card.
        facts (`CardFacts`, *optional*): What no file holds.
        force (`bool`, *optional*, defaults to `False`): Whether a card that was not made here, or was edited outside
            its regions, is given up.
        drafter (`Drafter`, *optional*): The drafter, if it is loaded already.

    Returns:
        `huggingface_hub.ModelCard`: the card.

    Raises:
        FileExistsError: If there is a card that would be lost.
        ValueError: If the folder holds no drafter, or results of another one.

    Example:

    ```python
    >>> from hf_dspark.hub import embedded_drafter
    >>> from hf_dspark.hub.card import make_card

    >>> make_card(embedded_drafter()).data.base_model
    'HuggingFaceTB/SmolLM2-135M-Instruct'
    ```
    """
    folder, facts = Path(folder), facts or CardFacts()
    drafter = drafter or _load(folder)
    old = _old_card(folder, force)
    kept = read_regions(old.content) if old else {}
    facts = _with_old(facts, old)
    results = read_results(folder) if (folder / RESULTS_FILE).is_file() else None
    contenders = card_results.contenders_of(results, drafter, folder, facts.repo_id) if results else {}
    name = facts.base_model or drafter.config.target_name_or_path
    data = _metadata(drafter, folder, facts, old)
    if results:
        data.eval_results = card_results.eval_results(results, contenders, facts.repo_id) or None
    if not data.eval_results:
        data.pop("model_name")  # names the results, and nothing else
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=f"{NAMES[drafter.config.model_type]} drafter for {markdown(short_name(name) or 'a target')}",
        kind=NAMES[drafter.config.model_type],
        base_link=_link(name),
        base_literal=json.dumps(_in_code(name)),
        drafter_literal=json.dumps(facts.repo_id or "path/to/this/folder"),
        repo_id=facts.repo_id,
        engines=_engines(drafter, facts.repo_id, name),
        facts=drafter_table(drafter),
        settings=settings_table(drafter),
        training=_training(drafter, folder, facts, bool(kept.get("training", "").strip())),
        evaluation=_evaluation(folder, results, contenders, bool(kept.get("evaluation", "").strip())),
        limits=_limits(drafter, data, results, contenders),
        citations=_citations(drafter.config.model_type),
        region=render_regions(kept),
    )
    card.text = add_header(card.text, {"repo_id": facts.repo_id, "thinking": facts.thinking})
    return card


def write_card(
    folder: str | os.PathLike,
    facts: CardFacts | None = None,
    force: bool = False,
    drafter: Drafter | None = None,
) -> Path:
    """
    Makes a card and puts it in the folder, with a plot of the losses where matplotlib is installed. See [`make_card`].

    Returns:
        `Path`: the card.
    """
    folder = Path(folder)
    drafter = drafter or _load(folder)
    _plot_losses(drafter, folder)
    card = make_card(folder, facts, force, drafter)
    aside = folder / f".{CARD}.{os.getpid()}.tmp"
    try:
        card.save(aside)
        aside.replace(folder / CARD)
    finally:
        aside.unlink(missing_ok=True)
    return folder / CARD


def copy_results(source: str | os.PathLike, folder: str | os.PathLike) -> None:
    """
    Puts the results of an evaluation, and its plots, beside a drafter, where its card finds them. Folders of this
    machine that are named in them are left out.

    Args:
        source (`str`): What `hf-dspark evaluate` wrote: a folder, or its `results.json`.
        folder (`str`): The drafter's.

    Raises:
        OSError: If there are none, or no drafter.
        ValueError: If they are no results of an evaluation.
    """
    require_drafter(Path(folder))
    results = read_results(source)
    write_results(folder, without_paths({name: results[name] for name in results if name != "schema_version"}))
    plots = (Path(source) if Path(source).is_dir() else Path(source).parent) / PLOTS
    place = Path(folder) / PLOTS
    for file in plots.glob("*.png") if plots.resolve() != place.resolve() else ():
        place.mkdir(exist_ok=True)
        shutil.copyfile(file, place / file.name)


def _load(folder: Path) -> Drafter:
    from ..auto import AutoDrafter

    require_drafter(folder)
    return AutoDrafter.from_pretrained(folder)


def require_drafter(folder: Path) -> None:
    """
    Raises:
        FileNotFoundError: If the folder holds no drafter.
        ValueError: If it holds adapters of one.
    """
    refuse_adapter_folder(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no drafter (no config.json). Save one there first.")


def _old_card(folder: Path, force: bool) -> ModelCard | None:
    file = folder / CARD
    if not file.is_file():
        return None
    card = ModelCard.load(file, ignore_metadata_errors=True)
    if force:
        return card
    if read_header(card.content) is None:
        raise FileExistsError(
            f"The {CARD} that is there was not made by hf-dspark, and its text would be lost. Move it away, run this "
            "again, and put what you want to keep into a region of the new card; or replace it with force=True "
            "(--force)."
        )
    if was_edited(card.text):
        raise FileExistsError(
            f"The {CARD} that is there was edited outside its regions, and that would be lost. Move it between "
            "`by hand` and `end of`, or replace it with force=True (--force)."
        )
    return card


def _with_old(facts: CardFacts, old: ModelCard | None) -> CardFacts:
    """The facts, filled up with those of the card that is there already."""
    if old is None:
        return facts
    header, data = read_header(old.content) or {}, old.data
    known = {
        "repo_id": header.get("repo_id"),
        "thinking": header.get("thinking"),
        "base_model": data.get("base_model") if isinstance(data.get("base_model"), str) else None,
        "license": data.get("license"),
        "languages": data.get("language"),
        "datasets": data.get("datasets"),
        "tags": data.get("tags"),
    }
    given = {name: value for name, value in asdict(facts).items() if value not in (None, [])}
    return CardFacts(**{**known, **given})


def _metadata(drafter: Drafter, folder: Path, facts: CardFacts, old: ModelCard | None) -> ModelCardData:
    kind, record = drafter.config.model_type, drafter.training_record or {}
    recorded = filter(hub_id, (record.get("data") or {}).get("datasets") or [])
    base = hub_id(facts.base_model or drafter.config.target_name_or_path)
    own = {
        "license": facts.license,
        "language": facts.languages or None,
        "base_model": base,
        # Of the relations that the Hub knows, the one whose models run beside their base model.
        "base_model_relation": "adapter" if base else None,
        "library_name": "hf-dspark",
        "pipeline_tag": "text-generation",
        "datasets": facts.datasets or [*recorded] or None,
        "tags": ["speculative-decoding", kind, "hf-dspark", "custom_generate", *map(one_line, facts.tags)],
        "model_name": short_name(facts.repo_id) or one_line(folder.resolve().name),
    }
    # What else the owner has put there stays.
    more = {} if old is None else {k: v for k, v in old.data.to_dict().items() if k not in (*own, "model-index")}
    return ModelCardData(**own, **more)


def _link(name: Any) -> str:
    base = hub_id(name)
    if base:
        return f"[{markdown(short_name(base))}](https://huggingface.co/{base})"
    return f"its target ({markdown(short_name(name) or MISSING)}, not known on the Hub)"


def _in_code(target: Any) -> str:
    """The target in snippets and command lines; names that would need quoting are left to the reader."""
    name = hub_id(target) or short_name(target) or ""
    return name if _PLAIN.fullmatch(name) else "TARGET"


def _engines(drafter: Drafter, repo_id: str | None, target: Any) -> list[dict[str, str]]:
    source, stem, target = repo_id or "path/to/this/folder", short_name(repo_id) or "my-drafter", _in_code(target)
    # A checkpoint that an engine takes as it is stays where it is; exports are made beside the reader.
    as_it_is, exported = (servings(drafter.config, name, target, drafter.stored_format) for name in (source, stem))
    found: dict[str, dict[str, str]] = {}
    for serving in (a if a.format is None else b for a, b in zip(as_it_is, exported)):
        if serving.engine in found and not found[serving.engine]["reasons"]:
            continue
        convert = f"hf-dspark convert {source} {stem}-{serving.format} --to {serving.format} --target {target}"
        found[serving.engine] = {
            "engine": serving.engine,
            "reasons": markdown("; ".join(serving.reasons).replace("`", ""), limit=1000),
            "convert": convert if serving.format else "",
            "command": serving.command,
        }
    return list(found.values())


def _training(drafter: Drafter, folder: Path, facts: CardFacts, by_hand: bool) -> dict[str, str]:
    record = training_record(drafter, folder)
    if record and facts.thinking is not None:
        record = record | {"data": {"thinking": facts.thinking, **_known(record.get("data") or {})}}
    return training_facts(record, by_hand) | {"plot": LOSS_PLOT if (folder / LOSS_PLOT).is_file() else ""}


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def training_record(drafter: Drafter, folder: Path) -> dict[str, Any] | None:
    """How the drafter was trained: its record, or what a checkpoint of the trainer tells."""
    return drafter.training_record or record_of_state(folder)


def record_of_state(folder: Path) -> dict[str, Any] | None:
    """What the `trainer_state.json` of a checkpoint tells, for checkpoints without a record."""
    file = folder / TRAINER_STATE_NAME
    if not file.is_file():
        return None
    state = json.loads(file.read_text(encoding="utf-8"))
    return {"updates": state.get("global_step"), "epochs": state.get("epoch"), "log": state.get("log_history")}


def _plot_losses(drafter: Drafter, folder: Path) -> None:
    from .plots import plot_losses

    plot_losses((training_record(drafter, folder) or {}).get("log") or [], folder / LOSS_PLOT)


def _evaluation(folder: Path, results: dict | None, contenders: dict, by_hand: bool) -> dict[str, Any]:
    if results is None:
        told = " What follows was written by hand." if by_hand else ""
        return {
            "summary": f"No results of `hf-dspark evaluate` came with the checkpoint.{told}",
            "parts": [],
            "plots": [],
        }
    files = sorted(file for file in (folder / PLOTS).glob("*.png") if f"{PLOTS}/{file.name}" != LOSS_PLOT)
    return {
        "summary": card_results.summary(results),
        "parts": card_results.parts(results, contenders),
        "plots": [{"title": markdown(file.stem.replace("_", " ")), "path": f"{PLOTS}/{file.name}"} for file in files],
    }


def _limits(drafter: Drafter, data: ModelCardData, results: dict | None, contenders: dict) -> list[str]:
    longest = drafter.config.max_trained_length
    length = f"sequences of up to {longest:,} tokens" if longest else f"sequences of a length that is {MISSING}"
    languages = ", ".join(map(markdown, _listed(data.language))) or MISSING
    tried = sorted({entry["rows"] for entry in card_results.entries(results, contenders)}) if results else []
    rows = ", ".join(map(str, tried)) or MISSING
    return [
        f"Trained on {length}{_last_length(drafter)}. Beyond that, acceptance was not looked at here.",
        f"Languages: {languages}.",
        f"Rows decoded at once in the evaluation: {rows}.",
        "A drafter shortens decoding only where a target forward over several tokens costs little more than one over "
        "a single token. Where it does not, plain decoding is faster.",
        "What the target gets wrong stays wrong.",
        f"Licence: {markdown(data.license) if data.license else MISSING}.",
    ]


def _last_length(drafter: Drafter) -> str:
    """Where the last of several trainings had shorter sequences than the drafter had seen before."""
    longest = longest_trained(drafter.training_record)
    if longest is None or longest >= (drafter.config.max_trained_length or 0):
        return ""
    return f", those of its last training of up to {longest:,}"


def _listed(value: Any) -> Iterable[Any]:
    return [value] if isinstance(value, str) else value or []


def _citations(kind: str) -> str:
    own = [PAPERS[kind], *((name, number) for other, (name, number) in PAPERS.items() if other != kind)]
    papers = [f"{name}: [arXiv {number}](https://arxiv.org/abs/{number})" for name, number in own]
    sampling = ", ".join(f"[arXiv {n}](https://arxiv.org/abs/{n})" for n in ("2211.17192", "2302.01318"))
    return ". ".join(papers) + f". Speculative sampling: {sampling}."
