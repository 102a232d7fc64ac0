"""
Whether drafters that hf-dspark exported load in the `speculators` package, and whether its training forward gives the
same logits. Runs where `speculators` is installed and hf-dspark need not be:

    python speculators_check.py CASE [CASE ...]

A case is a folder of `drafter/` (the export), and `case.safetensors`: the inputs, and what hf-dspark made of them.
`test_speculators_package.py` writes the cases and runs this. Prints one line a case; exits with 1 if any differs.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config


TOLERANCE = 1e-4


def load(folder: Path) -> torch.nn.Module:
    config = SpeculatorModelConfig.from_pretrained(folder)
    # Its default, flex attention, compiles its masks; this one runs anywhere.
    config.transformer_layer_config._attn_implementation = "sdpa"
    return SpeculatorModel.from_pretrained(folder, config=config).eval()


class Recorded:
    """A loss function that remembers the logits it is given; every forward of the package takes one."""

    def __init__(self) -> None:
        self.logits = []

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert targets.isfinite().all(), "the verifier's weights were not loaded"
        self.logits.append(logits)
        return logits.new_zeros(logits.shape[:2])


@torch.no_grad()
def outputs(model: torch.nn.Module, case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the package's training forward makes of a case."""
    recorded, confidences = Recorded(), []
    if getattr(model, "confidence_head", None) is not None:
        model.confidence_head.register_forward_hook(lambda *args: confidences.append(args[-1]))
    # For its metrics; the default is a GPU kernel.
    metrics = {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]} if hasattr(model, "markov_head") else {}
    ids = case["input_ids"]
    inputs = {
        "hidden_states": case["features"],
        "input_ids": ids,
        "verifier_last_hidden_states": case["last_hidden"],
        "document_ids": torch.zeros_like(ids),
        "loss_config": {"recorded": (recorded, 1.0)},
    }
    if "anchors" not in case:
        model(**inputs, loss_mask=torch.ones_like(ids, dtype=torch.bool), ttt_steps=int(case["steps"]))
        return {f"logits.{step}": logits for step, logits in enumerate(recorded.logits)}
    # Anchors are drawn among the supervised positions: all of them, if they are as many as are drawn.
    anchors = case["anchors"]
    loss_mask = torch.zeros_like(ids).scatter(1, anchors, 1)
    model(**inputs, **metrics, loss_mask=loss_mask, max_anchors=anchors.shape[1])
    return {"logits": recorded.logits[0]} | ({"confidences": confidences[0].flatten()[None]} if confidences else {})


def check(folder: Path) -> bool:
    case = load_file(folder / "case.safetensors")
    expected = {k.removeprefix("expected."): t for k, t in case.items() if k.startswith("expected.")}
    found, differences = outputs(load(folder / "drafter"), case), {}
    for name, ours in expected.items():
        theirs = found[name][:, : ours.shape[1]] if name in found else None
        same_shape = theirs is not None and theirs.shape == ours.shape
        # Not-a-number compares as infinitely different.
        differences[name] = (theirs - ours).abs().max().nan_to_num(torch.inf).item() if same_shape else torch.inf
    worst = max(differences.values())
    print(f"{folder.name}: {', '.join(f'{name} {d:.1e}' for name, d in differences.items())}", flush=True)
    return worst <= TOLERANCE and found.keys() == expected.keys()


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    failed = [name for name in sys.argv[1:] if not check(Path(name))]
    print(f"{len(sys.argv) - 1 - len(failed)} of {len(sys.argv) - 1} within {TOLERANCE}")
    sys.exit(1 if failed else 0)
