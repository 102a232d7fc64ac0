"""`hf-dspark inspect`: what a checkpoint is, and who can use it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option


if TYPE_CHECKING:
    from ..models.drafter import Drafter


def inspect(
    checkpoint: Annotated[str, Argument(help="The drafter, or adapters of one: a folder or Hub id.")],
    target: Annotated[
        str | None,
        Option(help="Its target, for the engines' command lines.", show_default="the one that the drafter names"),
    ] = None,
) -> None:
    """
    Tell what CHECKPOINT is, which formats can carry it, and how engines serve it.
    """
    from transformers.utils.logging import disable_progress_bar

    from ..hub.pairs import drafter_folder
    from ..models.export import refusals_of_any_format
    from .convert import load_as_stored

    checkpoint = drafter_folder(checkpoint)
    disable_progress_bar()
    drafter = load_as_stored(checkpoint)
    console, adapters = Console(highlight=False), _adapters(drafter)
    if adapters:
        # As `hf-dspark convert` does.
        drafter.merge_adapters()
    reasons = refusals_of_any_format(drafter)
    console.print(_facts(checkpoint, drafter, adapters))
    console.print(_formats(drafter.config, reasons))
    target = target or drafter.config.target_name_or_path or "TARGET"
    _print_engines(console, checkpoint, drafter, target, reasons)


def _adapters(drafter: Drafter) -> list[tuple[str, str]]:
    """What is told of adapters; nothing of a drafter without."""
    from ..models.adapters import merged_size

    if not drafter.has_adapters:
        return []
    config = drafter.peft_config[drafter.active_adapters()[0]]
    size = sum(parameter.numel() for parameter in drafter.parameters()) - merged_size(drafter)
    rank = f" of rank {config.r}" if getattr(config, "r", None) else ""
    whole = getattr(config, "modules_to_save", None)
    beside = f", whole modules among them: {', '.join(sorted(whole))}" if whole else ""
    return [
        ("adapters", f"{config.peft_type.value}{rank}, {size:,} parameters{beside}"),
        ("base", str(config.base_model_name_or_path)),
        ("", "what follows is of the drafter that `hf-dspark convert` merges of them"),
    ]


def _facts(checkpoint: str, drafter: Drafter, adapters: list[tuple[str, str]]) -> Table:
    config, text = drafter.config, drafter.config.text_config
    facts = _table(checkpoint)
    for name, told in adapters:
        facts.add_row(name, Text(told))
    facts.add_row("drafter", f"{_name(config)} with {text.model_type} layers; format {drafter.stored_format}")
    facts.add_row("target", config.target_name_or_path or "not named")
    facts.add_row("layers", f"{text.num_hidden_layers}, hidden size {text.hidden_size}{_windows(config)}")
    facts.add_row("attention", f"{text.num_attention_heads} heads, {text.num_key_value_heads} for keys and values")
    facts.add_row("drafts", _drafts(config))
    if config.model_type == "dspark":
        facts.add_row("heads", _heads(config))
    facts.add_row("vocabulary", _vocabulary(config))
    facts.add_row("features", _features(config))
    facts.add_row("size", _size(drafter))
    facts.add_row("borrowed", _borrowed(config))
    for name, reason in (config.assumed or {}).items():
        facts.add_row("assumed", f"{name} = {reason}")
    return facts


def _table(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _name(config: Any) -> str:
    from ..models.configuration_drafter import NAMES

    return NAMES[config.model_type]


def _windows(config: Any) -> str:
    sliding = sum(config.is_sliding(i) for i in range(config.num_hidden_layers))
    return f", {sliding} of them with a window of {config.text_config.sliding_window}" if sliding else ""


def _drafts(config: Any) -> str:
    if config.model_type == "eagle3":
        return f"{config.num_drafts} a round, one after the other"
    slots = "every slot proposes" if config.sample_from_anchor else "only the mask slots propose"
    return f"{config.num_drafts} a round, at once: blocks of {config.block_size}, {slots}, mask {config.mask_token_id}"


def _heads(config: Any) -> str:
    serial = f"{config.markov_head_type} serial head of rank {config.markov_rank}" if config.markov_rank else ""
    confidence = "confidence head" if config.enable_confidence_head else "no confidence head"
    return ", ".join(filter(None, (serial or "no serial head", confidence)))


def _vocabulary(config: Any) -> str:
    whole = str(config.vocab_size) if config.vocab_size else "that of the target"
    return f"{config.draft_vocab_size} of {whole}" if config.draft_vocab_size else whole


def _features(config: Any) -> str:
    if isinstance(config.target_layer_ids, str):
        return "outputs of EAGLE-3's own three target layers"
    of = f" of {config.num_target_layers}" if config.num_target_layers else ""
    return f"outputs of the target layers {', '.join(map(str, config.target_layer_ids))}{of} (-1: embeddings)"


def _size(drafter: Drafter) -> str:
    tensors = drafter.state_dict().values()
    parameters, size = sum(p.numel() for p in drafter.parameters()), sum(t.numel() * t.element_size() for t in tensors)
    dtype = str(drafter.dtype).removeprefix("torch.")
    return f"{parameters:,} parameters, {size / 1e6:.1f} MB in {dtype}"


def _borrowed(config: Any) -> str:
    from ..models.configuration_drafter import PARTS

    own = {"embed_tokens": config.own_embedding, "lm_head": config.own_head}
    borrowed = [PARTS[part] for part in PARTS if not own[part]]
    stored = [PARTS[part] for part in PARTS if own[part]]
    words = f"{' and '.join(borrowed)}, from the target" if borrowed else "nothing"
    return words + (f"; {' and '.join(stored)} in the file, dropped where equal to the target's" if stored else "")


def _formats(config: Any, reasons: list[str]) -> Table:
    from ..checkpoints.capabilities import CAPABILITIES

    formats = _table("\nFormats (hf-dspark convert ... --to FORMAT)")
    for name in CAPABILITIES:
        formats.add_row(name, _verdict(config, name, reasons))
    return formats


def _verdict(config: Any, name: str, reasons: list[str]) -> str:
    """What `hf-dspark convert --to` makes of it."""
    from ..checkpoints.capabilities import needs_target, refusals

    reasons = reasons or refusals(config, name, mere_copies=True)
    if reasons:
        return "no: " + "; ".join(reasons)
    if refusals(config, name):
        return "yes, with --target, if its own parts are copies of the target's"
    return "yes, with --target" if needs_target(config, name) else "yes"


def _print_engines(console: Console, checkpoint: str, drafter: Drafter, target: str, reasons: list[str]) -> None:
    from ..checkpoints.engines import servings

    console.print("\nEngines", style="italic")
    run = f'hf-dspark generate "PROMPT" --target {shlex.quote(target)} --drafter {shlex.quote(checkpoint)}'
    _print_engine(console, "transformers, through hf-dspark", run, [])
    for serving in servings(drafter.config, checkpoint, target, drafter.stored_format):
        origin = "the checkpoint as it is" if serving.format is None else f"from --to {serving.format}"
        label = f"{serving.engine} (read from its sources, not run here), {origin}"
        _print_engine(console, label, serving.command, reasons or serving.reasons)


def _print_engine(console: Console, label: str, command: str, reasons: list[str]) -> None:
    console.print(Text(label, style="bold"))
    if reasons:
        console.print(Text(f"  no: {'; '.join(reasons)}"))
    else:
        console.print(Text(f"  {command}"), soft_wrap=True)
