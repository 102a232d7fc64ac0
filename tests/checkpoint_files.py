"""Edits a checkpoint's files, to damage them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def edit_config(folder: Path, drop: tuple = (), nested: str | None = None, **fields) -> None:
    """Sets and drops fields of a config.json, or of a `nested` part of it."""
    config = json.loads((folder / "config.json").read_text())
    part = config[nested] if nested else config
    part.update(fields)
    for name in drop:
        del part[name]
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, drop: tuple = (), **tensors: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors") | {k.replace("__", "."): t for k, t in tensors.items()}
    save_file({k: t for k, t in weights.items() if k not in drop}, folder / "model.safetensors")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
