"""`hf-dspark train`: a drafter from a file of settings."""

from __future__ import annotations

from dataclasses import MISSING
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import BadParameter, Context


if TYPE_CHECKING:
    from ..training.run import PreparedRun

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

LESSON = """\
Usage: hf-dspark train --config NAME [--FIELD VALUE ...]

Train a drafter for a target model. The target stays as it is; the drafter learns to guess what it writes.

  1. Have the target answer prompts like those you will ask:  hf-dspark regenerate ...
  2. See what the run would take:   hf-dspark train --config embedded --train_data answers.jsonl --dry_run
  3. Train:                         hf-dspark train --config embedded --train_data answers.jsonl
     After an interruption:         the same with --resume
  4. Use OUTPUT_DIR/final:          target.generate(..., assistant_model=drafter)

A configuration is a YAML file of the fields below, or the name of a ready one; flags win over it. Copy a ready one
with --show NAME > run.yaml. On several GPUs: accelerate launch "$(command -v hf-dspark)" train ...

Accepted length (tokens committed per target forward) decides which checkpoint is best: it is measured on held-out
examples by real decoding, since a falling loss does not promise it.
"""


OTHERS = """\
Every field of transformers' TrainingArguments works too (--output_dir, --learning_rate, --max_steps, --eval_steps,
--num_train_epochs, --per_device_train_batch_size, --gradient_accumulation_steps, --save_steps, --report_to, ...):
hf-dspark train --help-all lists them."""


def train(context: Context) -> None:
    """Train a drafter for your model; `hf-dspark train --help` teaches how."""
    from ..training.run import config_file, make_parser, parse_run, shipped_configs

    arguments = list(context.args)
    console = Console(highlight=False, soft_wrap=True)
    if not arguments or {"--help", "-h", "--help-all"} & set(arguments):
        console.print(Text(_help(shipped_configs(), full="--help-all" in arguments)))
        return
    if arguments[0] == "--list":
        console.print(Text("\n".join(_listed(shipped_configs()))))
        return
    if arguments[0] == "--show":
        if len(arguments) != 2:
            raise BadParameter("name a configuration: --show NAME")
        print(config_file(arguments[1]).read_text(encoding="utf-8"), end="")
        return
    parser = make_parser(prog="hf-dspark train", add_help=False)
    parser.error = _refuse
    try:
        run = parse_run(arguments, parser)
    except ValueError as error:
        _refuse(_unknown_field(arguments) or str(error))
    prepared = run.prepare()
    if run.run.dry_run:
        prepared.put_adapters()
    if run.args.process_index == 0:
        console.print(_plan(prepared))
    if run.run.dry_run:
        console.print(Text("Dry run: nothing was trained."))
        return
    try:
        final = prepared.train()
    except FloatingPointError as error:
        raise ValueError(str(error)) from error
    if run.args.process_index == 0:
        console.print(Text(f"The drafter is in {final}."))


def _refuse(message: str) -> NoReturn:
    raise BadParameter(f"{message.rstrip('.')}. `hf-dspark train --help` lists the fields.")


def _unknown_field(arguments: list[str]) -> str | None:
    """What to say of the first flag that is no field; `None` if all are."""
    from dataclasses import fields
    from difflib import get_close_matches

    from ..training.run import ARGUMENTS

    known = ["config", *(field.name for group in ARGUMENTS for field in fields(group) if field.init)]
    for flag in (argument.split("=")[0] for argument in arguments if argument.startswith("--")):
        name = flag.removeprefix("--").replace("-", "_")
        if name in known or name.removeprefix("no_") in known:
            continue
        close = get_close_matches(name, known, n=1)
        return f"There is no field {flag}" + (f"; do you mean --{close[0]}?" if close else "")
    return None


# ---------------------------------------------------------------------- help


def _listed(configs: dict[str, str]) -> list[str]:
    width = max(map(len, configs))
    return [f"  {name:{width}}  {line}" for name, line in configs.items()]


def _help(configs: dict[str, str], full: bool) -> str:
    """The lesson, the ready configurations, and our fields; all of transformers' too if asked."""
    from dataclasses import fields

    from transformers import TrainingArguments

    from ..training.run import ARGUMENTS

    theirs = {field.name for field in fields(TrainingArguments)}
    parts = [LESSON, "Ready configurations (--list, --show NAME):", *_listed(configs)]
    for group in ARGUMENTS:
        title = getattr(group, "_argument_group_name", "training")
        parts += ["", f"{title}: {group.__doc__}" if title != "training" else "training"]
        parts += [_field(field) for field in fields(group) if field.init and (full or field.name not in theirs)]
    if not full:
        parts += ["", OTHERS]
    return "\n".join(parts)


def _field(field: Any) -> str:
    default = "" if field.default in (None, False) or field.default is MISSING else f" [{field.default}]"
    text = " ".join(str(field.metadata.get("help", "")).split()) + default
    lines = wrap(text, 84)
    return f"  --{field.name:26}" + ("\n" + " " * 30).join(lines)


# ---------------------------------------------------------------------- what is about to happen


def _plan(run: PreparedRun) -> Table:
    from ..models.adapters import merged_size
    from ..training.memory import available_memory

    args, drafter = run.settings.args, run.drafter
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    target = run.target
    table.add_row(
        "target",
        f"{run.settings.target.target}, {_count(target.num_parameters())} parameters, "
        f"{str(target.dtype).removeprefix('torch.')}",
    )
    came = f"from {run.settings.drafter.drafter}" if run.settings.drafter.drafter else "fresh"
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    table.add_row(
        "drafter",
        f"{type(drafter).__name__}, {came}, {drafter.config.num_hidden_layers} layers, {drafter.num_drafts} drafts a "
        f"round, {drafter.config.output_size} of {drafter.config.vocab_size} tokens, "
        f"{_count(merged_size(drafter))} parameters",
    )
    if run.peft_config is not None:
        what = f"LoRA of rank {run.peft_config.r}" + (" and whole heads" if args.train_heads else "")
        table.add_row("trained", what + (f", {_count(trained)} parameters" if drafter.has_adapters else ""))
    masks = run.train_dataset["loss_mask"]
    lengths = [len(mask) for mask in masks]
    table.add_row(
        "data",
        f"{len(lengths)} examples, {sum(lengths)} tokens, {sum(map(sum, masks))} of them supervised, longest "
        f"{max(lengths)}; {_held_out(run.eval_dataset)} held out",
    )
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    updates = args.max_steps if args.max_steps > 0 else round(args.num_train_epochs * -(-len(lengths) // batch))
    table.add_row("run", f"{updates} updates of {batch} sequences, learning rate {args.learning_rate:g}")
    memory = run.memory()
    parts = ("target", "drafter", "features", "activations", "logits")
    detail = ", ".join(f"{part} {getattr(memory, part) / 2**30:.2f}" for part in parts)
    table.add_row("memory", f"about {memory.total / 2**30:.1f} GiB a device ({detail})")
    available = available_memory()
    if available and memory.total > available:
        table.add_row("", f"more than the {available / 2**30:.0f} GiB here: lower the batch, anchors or max_length")
    table.add_row("output", str(args.output_dir))
    return table


def _held_out(dataset: Any) -> str:
    if isinstance(dataset, dict):
        return " and ".join(f"{len(part)} ({name})" for name, part in dataset.items())
    return str(len(dataset or []))


def _count(size: int) -> str:
    return f"{size / 1e9:.2f} B" if size > 1e9 else f"{size / 1e6:.2f} M"
