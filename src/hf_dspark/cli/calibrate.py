"""`hf-dspark calibrate`: make a drafter's confidences mean what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import BadParameter, Option

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
    if bool(target) != bool(drafter):
        raise BadParameter("name target and drafter together.")
    prompts = _read(data, samples)

    import torch

    from ..auto import AutoDrafter
    from ..evaluation.calibration import calibrate_confidence
    from ..hub import embedded_drafter
    from .decoding import load_drafter, load_target

    source = drafter or embedded_drafter()
    if save.exists() and any(save.iterdir()) and save.resolve() != Path(source).resolve():
        raise FileExistsError(f"{save} is not empty. Name another folder with --save.")
    torch.manual_seed(seed)
    model, tokenizer = load_target(target, dtype)
    found = calibrate_confidence(model, load_drafter(drafter, model), prompts, tokenizer, temperature, max_new_tokens)
    # As it was stored: what decoded may have been cast to the target's type.
    stored = AutoDrafter.from_pretrained(source)
    stored.generation_config.confidence_temperatures = found.temperatures
    stored.generation_config.calibration_temperature = found.sampling_temperature
    stored.generation_config.save_pretrained(save) if save.exists() else stored.save_pretrained(save)
    console = Console(highlight=False)
    console.print(calibration_table(found))
    console.print(f"Kept in {save}", soft_wrap=True)
    if plot:
        from ..evaluation.plots import save as save_figure

        save_figure(found.plot(), plot)
        console.print(f"Drawn in {plot}", soft_wrap=True)


def _read(files: list[Path], samples: int) -> list[dict[str, Any]]:
    """The same number of prompts from each file, taken in turns."""
    examples = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()[: -(-samples // len(files))], 1):
            try:
                examples.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}, is not JSON: {error}") from None
    # Line by line through all files, so that those held out come from each.
    return [example for _, example in sorted(examples, key=lambda pair: pair[0])][:samples]


def calibration_table(found: Calibration) -> Table:
    """Temperatures, errors and AUC by draft position, before and after."""
    how = f"temperature {found.sampling_temperature:g}" if found.sampling_temperature else "greedy"
    table = Table(
        title=f"Fitted on {found.fitted_rounds} rounds, measured on {len(found.accepted)} others; {how}",
        title_justify="left",
    )
    for column in ("draft", "temperature", "accepted", "ECE before", "ECE after", "AUC before", "AUC after"):
        table.add_column(column, justify="right")
    errors = [found.errors(when) for when in ("before", "after")]
    aucs = [found.aucs(when) for when in ("before", "after")]
    observed = found.accepted.double().mean(0).tolist()
    for k, temperature in enumerate(found.temperatures):
        shares = (f"{share:.1%}" for share in (observed[k], errors[0][k], errors[1][k]))
        table.add_row(str(k + 1), f"{temperature:.2f}", *shares, f"{aucs[0][k]:.3f}", f"{aucs[1][k]:.3f}")
    means = (f"{sum(values) / len(values):.1%}" for values in errors)
    table.add_section()
    table.add_row("mean", "", "", *means, "", "")
    return table
