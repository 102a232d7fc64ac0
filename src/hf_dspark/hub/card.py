"""A drafter's model card, made from the files beside it: facts, and what is missing said to be missing."""

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import ModelCard, ModelCardData
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoints.engines import servings
from ..evaluation.results import RESULTS_FILE, write_results
from ..models.adapters import refuse_adapter_folder
from ..models.configuration_drafter import NAMES
from ..models.drafter import Drafter
from ..models.loading import TRAINING_RECORD, longest_trained, read_object
from . import card_results
from .card_facts import MISSING, drafter_table, settings_table, training_entries, training_facts
from .escaping import markdown, one_line
from .names import hub_id, is_repo_id, short_name, without_paths
from .old_card import base_models, known_facts, read_old_card, results_by_hand
from .regions import add_header, read_regions, render_regions


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
            if name is not None and not (isinstance(name, str) and is_repo_id(name)):
                raise ValueError(f"{one_line(name)!r} is no Hub id. Write owner/name.")
        if self.base_model is not None and "/" not in self.base_model:
            raise ValueError(f"{one_line(self.base_model)!r} is no Hub id of a base model. Write owner/name.")
        if self.license is not None and not (isinstance(self.license, str) and _LICENSE.fullmatch(self.license)):
            raise ValueError(
                f"{one_line(self.license)!r} is no licence identifier of the Hub, such as apache-2.0; they are listed "
                "at https://huggingface.co/docs/hub/repositories-licenses."
            )
        for language in self.languages:
            if not (isinstance(language, str) and _LANGUAGE.fullmatch(language)):
                raise ValueError(f"{one_line(language)!r} is no language code. Write en, de, zh, code, ...")


def make_card(
    folder: str | os.PathLike,
    facts: CardFacts | None = None,
    force: bool = False,
    drafter: Drafter | None = None,
    results: str | os.PathLike | None = None,
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
        results (`str`, *optional*): Results of an evaluation that lie elsewhere.

    Returns:
        `huggingface_hub.ModelCard`: the card.

    Raises:
        FileExistsError: If there is a card that would be lost.
        ValueError: If the folder holds no drafter, something damaged, or results of another one.

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
    record = training_record(drafter, folder)
    own = _derived(drafter, record)
    old = read_old_card(folder / CARD, force)
    kept = read_regions(old.content) if old else {}
    facts = _with_old(facts, old, own, force)
    found = _results(folder, drafter, facts, results)
    contenders = card_results.contenders_of(found) if found else {}
    data = _metadata(drafter, folder, facts, own, old)
    name = facts.base_model or drafter.config.target_name_or_path
    if name is None and isinstance(data.base_model, list):
        name = data.base_model[0]
    measured = card_results.eval_results(found, contenders, facts.repo_id) if found else []
    by_hand = results_by_hand(old)
    data.eval_results = [*measured, *by_hand] or None
    if by_hand and not measured:
        data.model_name = old.data.model_name
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
        training=_training(record, folder, facts, bool(kept.get("training", "").strip())),
        evaluation=_evaluation(folder, found, contenders, bool(kept.get("evaluation", "").strip())),
        limits=_limits(drafter, data, found, contenders),
        citations=_citations(drafter.config.model_type),
        region=render_regions(kept),
    )
    remembered = {"repo_id": facts.repo_id, "thinking": facts.thinking, "derived": own}
    card.text = add_header(card.text, card.data.to_dict(), remembered)
    return card


def write_card(
    folder: str | os.PathLike,
    facts: CardFacts | None = None,
    force: bool = False,
    drafter: Drafter | None = None,
    results: str | os.PathLike | None = None,
) -> Path:
    """
    Makes a card and puts it in the folder, with a plot of the training where matplotlib is installed, and `results`
    from elsewhere with their plots. Nothing is written if something is refused. See [`make_card`].

    Returns:
        `Path`: the card.
    """
    folder = Path(folder)
    drafter = drafter or _load(folder)
    checked = make_card(folder, facts, force, drafter, results).data.base_model
    if results is not None:
        base_model = checked if isinstance(checked, str) else None
        copy_results(results, folder, drafter, [facts.repo_id] if facts else (), base_model)
    _plot_training(drafter, folder)
    card = make_card(folder, facts, force, drafter)
    aside = folder / f".{CARD}.{os.getpid()}.tmp"
    try:
        card.save(aside)
        aside.replace(folder / CARD)
    finally:
        aside.unlink(missing_ok=True)
    return folder / CARD


def copy_results(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    drafter: Drafter | None = None,
    names: Iterable[str | None] = (),
    base_model: str | None = None,
) -> None:
    """
    Puts the results of an evaluation, and its plots, beside a drafter, where its card finds them. Folders of this
    machine that are named in them are left out.

    Args:
        source (`str`): What `hf-dspark evaluate` wrote: a folder, or its `results.json`.
        folder (`str`): The drafter's.
        drafter (`Drafter`, *optional*): The drafter, if it is loaded already.
        names (`Iterable[str]`, *optional*): Other folders and Hub ids that it is known as.
        base_model (`str`, *optional*): Its target; the one that the checkpoint names by default.

    Raises:
        OSError: If there are none, or no drafter.
        ValueError: If they are no results of an evaluation, of other drafters, or of another target.
    """
    source, folder = Path(source), Path(folder)
    require_drafter(folder)
    drafter = drafter or _load(folder)
    place = source if source.is_dir() else source.parent
    results = card_results.read_own_results(source, drafter, [str(folder), *names], base_model)
    write_results(folder, without_paths({name: results[name] for name in results if name != "schema_version"}))
    if (place / PLOTS).resolve() == (folder / PLOTS).resolve():
        return
    for file in _evaluation_plots(folder):  # of an earlier evaluation
        file.unlink()
    for file in _evaluation_plots(place):
        (folder / PLOTS).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / PLOTS / file.name)


def _evaluation_plots(folder: Path) -> list[Path]:
    return sorted(file for file in (folder / PLOTS).glob("*.png") if f"{PLOTS}/{file.name}" != LOSS_PLOT)


def _results(
    folder: Path, drafter: Drafter, facts: CardFacts, elsewhere: str | os.PathLike | None
) -> dict[str, Any] | None:
    """The results that the card tells; `None` if there are none."""
    if elsewhere is None and not (folder / RESULTS_FILE).is_file():
        return None
    names = [str(folder), facts.repo_id]
    return card_results.read_own_results(elsewhere or folder, drafter, names, facts.base_model)


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


def _derived(drafter: Drafter, record: dict[str, Any] | None) -> dict[str, Any]:
    """What the checkpoint says of the metadata that a card may have from elsewhere too."""
    datasets = ((record or {}).get("data") or {}).get("datasets") or []
    return {"base_model": hub_id(drafter.config.target_name_or_path), "datasets": [*filter(hub_id, datasets)]}


def _with_old(facts: CardFacts, old: ModelCard | None, own: dict[str, Any], force: bool) -> CardFacts:
    """The facts, filled up with those of the card that is there already."""
    if old is None:
        return facts
    known = known_facts(old, own)
    for name, value in [*known.items()]:
        try:
            CardFacts(**{name: value})
        except ValueError as error:
            if force:
                del known[name]
                continue
            field = "language" if name == "languages" else name
            raise ValueError(f"{CARD}: `{field}`: {error} Correct it, or use force=True (--force).") from None
    given = {name: value for name, value in asdict(facts).items() if value not in (None, [])}
    return CardFacts(**{**known, **given})


def _metadata(
    drafter: Drafter, folder: Path, facts: CardFacts, own: dict[str, Any], old: ModelCard | None
) -> ModelCardData:
    kind, by_hand = drafter.config.model_type, old.data if old else {}
    base = facts.base_model or base_models(old) or own["base_model"]
    fields = {
        "license": facts.license,
        "language": facts.languages or None,
        "base_model": base,
        # Of the relations that the Hub knows, the one whose models run beside their base model.
        "base_model_relation": (by_hand.get("base_model_relation") or "adapter") if base else None,
        "library_name": by_hand.get("library_name") or "hf-dspark",
        "pipeline_tag": by_hand.get("pipeline_tag") or "text-generation",
        "datasets": [*dict.fromkeys([*own["datasets"], *facts.datasets])] or None,
        "tags": ["speculative-decoding", kind, "hf-dspark", "custom_generate", *map(one_line, facts.tags)],
        "model_name": short_name(facts.repo_id) or one_line(folder.resolve().name),
    }
    # What else the owner has put there stays.
    more = {k: v for k, v in old.data.to_dict().items() if k not in (*fields, "model-index")} if old else {}
    return ModelCardData(**fields, **more)


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


def _training(record: dict[str, Any] | None, folder: Path, facts: CardFacts, by_hand: bool) -> dict[str, str]:
    if record and facts.thinking is not None:
        record = record | {"data": {"thinking": facts.thinking, **_known(record.get("data") or {})}}
    is_drawn = len(training_entries((record or {}).get("log") or [])) > 1 and (folder / LOSS_PLOT).is_file()
    return training_facts(record, by_hand) | {"plot": LOSS_PLOT if is_drawn else ""}


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def training_record(drafter: Drafter, folder: Path) -> dict[str, Any] | None:
    """
    How the drafter was trained: its record, or what a checkpoint of the trainer tells. Local paths are cut.

    Raises:
        ValueError: If the file is damaged.
    """
    file = folder / TRAINING_RECORD
    record = read_object(file) if file.is_file() else drafter.training_record or record_of_state(folder)
    if record is not None:
        check_record(record, TRAINING_RECORD if file.is_file() else "training record")
    return without_paths(record)


def check_record(record: dict[str, Any], file: str) -> None:
    """
    Raises:
        ValueError: If a field that the card reads is not what `DraftTrainer` writes.
    """
    for name in ("data", "arguments", "machine", "versions"):
        if not isinstance(record.get(name), dict | None):
            raise ValueError(f"{file} is damaged: `{name}` is no object. Correct or remove it.")
    data = record.get("data") or {}
    if not isinstance(data.get("thinking"), bool | str | None):
        raise ValueError(
            f"{file} is damaged: `data.thinking` is neither true, false nor a word. Correct or remove it."
        )
    datasets = data.get("datasets")
    if not isinstance(datasets, list | None) or not all(isinstance(name, str) for name in datasets or []):
        raise ValueError(f"{file} is damaged: `data.datasets` is no list of names. Correct or remove it.")
    for name in ("log", "earlier"):
        entries = record.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{file} is damaged: `{name}` is no list of objects. Correct or remove it.")
    if not all(isinstance(entry.get("train_runtime", 0), int | float) for entry in record.get("log", [])):
        raise ValueError(f"{file} is damaged: `train_runtime` is no number. Correct or remove it.")
    for earlier in record.get("earlier", []):
        check_record(earlier, file)


def record_of_state(folder: Path) -> dict[str, Any] | None:
    """What the `trainer_state.json` of a checkpoint tells, for checkpoints without a record."""
    file = folder / TRAINER_STATE_NAME
    if not file.is_file():
        return None
    state = read_object(file)
    record = {"updates": state.get("global_step"), "epochs": state.get("epoch"), "log": state.get("log_history", [])}
    check_record(record, TRAINER_STATE_NAME)
    return record


def _plot_training(drafter: Drafter, folder: Path) -> None:
    from .plots import plot_training

    if plot_training(training_record(drafter, folder) or {}, folder / LOSS_PLOT) is None:
        (folder / LOSS_PLOT).unlink(missing_ok=True)  # of an earlier training


def _evaluation(folder: Path, results: dict | None, contenders: dict, by_hand: bool) -> dict[str, Any]:
    if results is None:
        told = " What follows was written by hand." if by_hand else ""
        return {
            "summary": f"No results of `hf-dspark evaluate` came with the checkpoint.{told}",
            "parts": [],
            "plots": [],
        }
    return {
        "summary": card_results.summary(results),
        "parts": card_results.parts(results, contenders),
        "plots": [
            {"title": markdown(file.stem.replace("_", " ")), "path": f"{PLOTS}/{quote(file.name)}"}
            for file in _evaluation_plots(folder)
        ],
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
