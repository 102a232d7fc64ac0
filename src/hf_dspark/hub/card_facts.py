"""What a drafter's files say of it, as tables and sentences of its card. What they don't say is said to be missing."""

import re
from collections.abc import Iterable
from typing import Any

from ..generation.settings import SETTING_NAMES
from ..models.configuration_drafter import NAMES, PARTS
from ..models.drafter import Drafter
from .escaping import code, markdown


MISSING = "not recorded"
LOSS_ROWS = 10
_ACCEPTED_LENGTH = re.compile(r"eval_((?P<set>.+)_)?accepted_length")
LOSSES = ("loss", "cross_entropy", "soft_cross_entropy", "l1", "confidence", "acceptance", "accepted_length")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table of cells that are Markdown already."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drafter_table(drafter: Drafter) -> str:
    """What kind of drafter it is, in numbers."""
    config, text = drafter.config, drafter.config.text_config
    rows = [
        ("Kind", NAMES[config.model_type]),
        ("Layers", f"{text.num_hidden_layers} ({markdown(text.model_type)}), hidden size {text.hidden_size}"),
        ("Drafts", _drafts(config)),
        ("Features", _features(config)),
        ("Vocabulary", _vocabulary(config)),
    ]
    if config.model_type == "dspark":
        rows.append(("Heads", _heads(config)))
    if config.model_type != "eagle3":
        rows.append(("Mask token", f"id {config.mask_token_id}"))
    rows += [("Size", _size(drafter)), ("Borrowed from the target", _borrowed(config))]
    rows += [("Assumed", f"{code(name)}: {markdown(why)}") for name, why in (config.assumed or {}).items()]
    return table(("", ""), rows)


def _drafts(config: Any) -> str:
    if config.model_type == "eagle3":
        return f"{config.num_drafts} a round, one after the other"
    slots = "every slot proposes" if config.sample_from_anchor else "the masked slots propose"
    return f"{config.num_drafts} a round, at once (block of {config.block_size}, {slots})"


def _features(config: Any) -> str:
    if isinstance(config.target_layer_ids, str):
        return "outputs of three layers of the target, as EAGLE-3 chooses them"
    return f"outputs of the target's layers {', '.join(map(str, config.target_layer_ids))}"


def _vocabulary(config: Any) -> str:
    whole = f"{config.vocab_size:,}" if config.vocab_size else "the target's"
    return f"{config.draft_vocab_size:,} of {whole} tokens can be drafted" if config.draft_vocab_size else whole


def _heads(config: Any) -> str:
    serial = f"{markdown(config.markov_head_type)} Markov head of rank {config.markov_rank}"
    confidence = "confidence head" if config.enable_confidence_head else "no confidence head"
    return f"{serial if config.markov_rank else 'no serial head'}, {confidence}"


def _size(drafter: Drafter) -> str:
    size = sum(tensor.numel() * tensor.element_size() for tensor in drafter.state_dict().values())
    count = sum(parameter.numel() for parameter in drafter.parameters())
    return f"{count:,} parameters, {size / 1e6:.1f} MB in {str(drafter.dtype).removeprefix('torch.')}"


def _borrowed(config: Any) -> str:
    own = {"embed_tokens": config.own_embedding, "lm_head": config.own_head}
    return " and ".join(PARTS[part] for part in PARTS if not own[part]) or "nothing"


def settings_table(drafter: Drafter) -> str:
    """The decoding settings that travel with the drafter, calibration among them."""
    stored = drafter.generation_config
    rows = [(code(name), _value(getattr(stored, name, None))) for name in SETTING_NAMES]
    calibration = ((name, getattr(stored, name)) for name in sorted(vars(stored)) if name.startswith("confidence_"))
    rows += [(code(name), _value(value)) for name, value in calibration if name not in SETTING_NAMES]
    return table(("Setting", "Value"), rows)


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list | tuple):
        return ", ".join(_value(each) for each in value)
    return markdown(f"{value:.4g}" if isinstance(value, float) else value)


def training_facts(record: dict[str, Any] | None, written_by_hand: bool) -> dict[str, str]:
    """The training section: what was learned from, arguments, losses."""
    if not record:
        told = " What follows was written by hand." if written_by_hand else ""
        return {"summary": f"No record of the training came with the checkpoint.{told}"}
    sentences = [_adapters_sentence(record["adapters"])] if record.get("adapters") else []
    sentences += [_data_sentence(record.get("data") or {}), _progress_sentence(record)]
    sentences += [f"Before that: {_progress_sentence(earlier)}" for earlier in reversed(record.get("earlier", []))]
    if record.get("adapters") and not record.get("earlier"):
        sentences.append(f"Training of the base drafter: {MISSING}.")
    sentences.append(_machine_sentence(record))
    arguments = record.get("arguments") or {}
    rows = [(code(name), markdown(value)) for name, value in arguments.items()]
    return {
        "summary": "\n\n".join(sentences),
        "arguments": table(("Argument", "Value"), rows) if rows else f"Training arguments: {MISSING}.",
        "losses": losses_table(record.get("log") or []),
    }


def _adapters_sentence(adapters: dict[str, Any]) -> str:
    named = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
    settings = ", ".join(f"{word} {markdown(adapters[name])}" for name, word in named.items() if adapters.get(name))
    base, whole = adapters.get("base"), ", ".join(map(code, adapters.get("modules_to_save") or []))
    return (
        f"Trained as adapters, which were then merged: {markdown(adapters.get('type') or MISSING)}"
        f"{f' of {settings}' if settings else ''}. Base drafter: {code(base) if base else MISSING}."
        f"{f' Trained whole beside them: {whole}.' if whole else ''}"
    )


def _data_sentence(data: dict[str, Any]) -> str:
    def number(name: str) -> str:
        return f"{data[name]:,}" if isinstance(data.get(name), int) else MISSING

    thinking = {True: "on", False: "off", "mixed": "on in some examples and off in others"}
    return (
        f"Examples: {number('examples')}; tokens: {number('tokens')}, of which supervised: "
        f"{number('supervised_tokens')}; longest sequence: {number('longest')}. "
        f"Supervised: {markdown(data.get('supervised') or MISSING)}. "
        f"Thinking mode: {thinking.get(data.get('thinking'), MISSING)}. "
        f"Datasets that it was loaded from: {', '.join(map(code, data.get('datasets') or [])) or MISSING}."
    )


def _progress_sentence(record: dict[str, Any]) -> str:
    epochs = record.get("epochs")
    rounded = f"{epochs:.2f}" if isinstance(epochs, int | float) else MISSING
    summary = next((entry for entry in reversed(record.get("log") or []) if "train_runtime" in entry), {})
    seconds = f"{summary['train_runtime']:,.0f} s" if summary else MISSING
    return f"Updates: {markdown(record.get('updates', MISSING))}; epochs: {rounded}; time: {seconds}."


def _machine_sentence(record: dict[str, Any]) -> str:
    machine, versions = record.get("machine") or {}, record.get("versions") or {}
    named = ", ".join(f"{markdown(name)} {markdown(version)}" for name, version in versions.items())
    return f"Machine: {markdown(machine.get('device_name') or MISSING)}. Versions: {named or MISSING}."


def losses_table(log: list[dict[str, Any]]) -> str:
    """The loss and its terms over the training, in at most `LOSS_ROWS` lines, and the evaluations."""
    parts = [("Training", _values(training_entries(log), ""))]
    evaluated = {key.removesuffix("loss") for entry in log for key in entry if key.startswith("eval_")}
    for prefix in sorted(prefix for prefix in evaluated if prefix.endswith("_")):
        entries = [entry for entry in log if f"{prefix}loss" in entry]
        name = prefix.removeprefix("eval_").removesuffix("_")
        title = f"Held-out examples ({markdown(name)})" if name else "Held-out examples"
        parts.append((title, _values(entries, prefix)))
    return "\n\n".join(f"{title}:\n\n{rows}" for title, rows in parts if rows)


def _values(entries: list[dict[str, Any]], prefix: str) -> str:
    """The loss and its terms in entries of a log; a set of several has a prefix of its own, its terms have none."""
    found = [{name: entry.get(prefix + name, entry.get(f"eval_{name}")) for name in LOSSES} for entry in entries]
    names = [name for name in LOSSES if any(values[name] is not None for values in found)]
    if not names:
        return ""
    rows = [
        [markdown(entry.get("step", "")), *(_value(_number(values[name])) for name in names)]
        for entry, values in zip(entries, found)
    ]
    return table(("Update", *(name.replace("_", " ") for name in names)), spread(rows, LOSS_ROWS))


def training_entries(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a log that hold the training loss."""
    return [entry for entry in log if None not in (_number(entry.get("loss")), _number(entry.get("step")))]


def learning_curves(record: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """
    For each held-out set: supervised tokens seen, earlier trainings included, and the accepted length then. Trainings
    may hold out different prompts, so a NaN parts one from the next. Empty where tokens were not counted.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    seen = 0.0
    for training in [*record.get("earlier", []), record]:
        tokens = _number((training.get("data") or {}).get("supervised_tokens"))
        epochs = _number(training.get("epochs"))
        if tokens is None or epochs is None:
            return {}
        for points in curves.values():
            points.append((seen, float("nan")))
        for entry in training.get("log") or []:
            for key, value in entry.items():
                found, epoch = _ACCEPTED_LENGTH.fullmatch(key), _number(entry.get("epoch"))
                if found and epoch is not None and _number(value) is not None:
                    curves.setdefault(found["set"] or "", []).append((seen + epoch * tokens, float(value)))
        seen += epochs * tokens
    return curves


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def spread(entries: list[Any], count: int) -> list[Any]:
    """At most `count` of the entries, evenly spread, the first and the last among them."""
    if len(entries) <= count:
        return entries
    return [entries[round(i * (len(entries) - 1) / (count - 1))] for i in range(count)]
