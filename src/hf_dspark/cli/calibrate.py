"""`hf-dspark calibrate`: make a drafter's confidences mean what they say."""

from __future__ import annotations

from itertools import islice
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Option

from ..files import json_lines
from .options import DrafterOption, DtypeOption, TargetOption


if TYPE_CHECKING:
    from ..evaluation.calibration import Calibration


def calibrate(
    data: Annotated[
        list[Path],
        Option(help="JSON lines with `prompt`, `messages` or `turns`, kept apart from what is evaluated; repeatable."),
    ],
    save: Annotated[Path, Option(help="Folder for the calibrated drafter; its own to update it.")],
    target: TargetOption = None,
    drafter: DrafterOption = None,
    samples: Annotated[int, Option(min=2, help="Prompts taken, spread over the files.")] = 64,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens decoded for each prompt.")] = 128,
    temperature: Annotated[float, Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    dtype: DtypeOption = "auto",
    plot: Annotated[Path | None, Option(help="Where to draw reliability diagrams (.png, .svg, .pdf).")] = None,
    seed: Annotated[int, Option(help="For sampling.")] = 0,
) -> None:
    """
    Fit one temperature a draft position on real decoding rounds, and keep them with the drafter.

    Three quarters of the prompts are fitted on; errors before and after are measured on the rest.
    """
    prompts = _read(data, samples)

    import torch

    from ..auto import AutoDrafter
    from ..evaluation.calibration import calibrate_confidence
    from ..hub.pairs import drafter_folder
    from .decoding import find_target, load_drafter, load_target

    target, source = find_target(target, [drafter] if drafter else []), drafter_folder(drafter)
    is_update = save.resolve() == Path(source).resolve()
    if save.is_file() or (save.exists() and any(save.iterdir()) and not is_update):
        raise FileExistsError(f"{save} is {'a file' if save.is_file() else 'not empty'}. Name a folder with --save.")
    if plot:
        from ..evaluation.plots import check_suffix

        check_suffix(plot)
    torch.manual_seed(seed)
    model, tokenizer = load_target(target, dtype)
    found = calibrate_confidence(model, load_drafter(drafter, model), prompts, tokenizer, temperature, max_new_tokens)
    # As it was stored: what decoded may have been cast to the target's type.
    stored = AutoDrafter.from_pretrained(source)
    stored.generation_config.confidence_temperatures = found.temperatures
    stored.generation_config.calibration_temperature = found.sampling_temperature
    stored.generation_config.save_pretrained(save) if is_update else stored.save_pretrained(save)
    console = Console(highlight=False)
    console.print(calibration_table(found))
    console.print(f"Kept in {save}", soft_wrap=True)
    if plot:
        from ..evaluation.plots import save as save_figure

        save_figure(found.plot(), plot)
        console.print(f"Drawn in {plot}", soft_wrap=True)


def _read(files: list[Path], samples: int) -> list[dict[str, Any]]:
    """The same number of prompts from each file, taken in turns."""
    examples = [row for file in files for row in islice(json_lines(file), -(-samples // len(files)))]
    # Line by line through all files, so that those held out come from each.
    return [example for _, example in sorted(examples, key=lambda pair: pair[0])][:samples]


def calibration_table(found: Calibration) -> Table:
    """Temperatures, errors and AUC by draft position, before and after."""
    how = f"temperature {found.sampling_temperature:g}" if found.sampling_temperature else "greedy"
    caption = f"Fitted on {found.fitted_rounds} rounds, measured on {len(found.accepted)} others; {how}."
    table = Table(box=None, pad_edge=False, header_style="dim", caption=caption, caption_justify="left")
    names = ("draft", "temper-\nature", "accepted", "ECE\nbefore", "ECE\nafter", "AUC\nbefore", "AUC\nafter")
    for column in names:
        table.add_column(column, justify="right")
    errors = [found.errors(when) for when in ("before", "after")]
    aucs = [found.aucs(when) for when in ("before", "after")]
    observed = found.accepted.double().mean(0).tolist()
    for k, temperature in enumerate(found.temperatures):
        shares = (f"{share:.1%}" for share in (observed[k], errors[0][k], errors[1][k]))
        table.add_row(str(k + 1), f"{temperature:.2f}", *shares, _auc(aucs[0][k]), _auc(aucs[1][k]))
    means = (f"{sum(values) / len(values):.1%}" for values in errors)
    table.add_row("mean", "", "", *means, "", "")
    return table


def _auc(value: float) -> str:
    return "-" if isnan(value) else f"{value:.3f}"  # undefined where all drafts were accepted, or none
