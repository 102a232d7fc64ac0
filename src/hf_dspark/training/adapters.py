"""PEFT adapters in training: what they sit on, and which parts are trained whole beside them."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.utils import logging

from ..models.adapters import check_adapters, merged_size, refuse_prompts, require_peft
from ..models.drafter import Drafter


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

logger = logging.get_logger(__name__)

# Of a drafter's own modules: its transformer, which adapters are for, and what stands in for the target's.
NOT_HEADS = ("layers", "embed_tokens", "lm_head", "rotary_emb")


def add_adapters(drafter: Drafter, peft_config: "PeftConfig", train_heads: bool) -> "PeftModel":
    """
    Puts fresh adapters on a drafter and freezes the rest.

    Args:
        drafter ([`Drafter`]): A drafter that was loaded from a checkpoint, which the adapters will name as their base.
        peft_config (`peft.PeftConfig`): The adapters; on every linear of the draft layers unless it names its
            `target_modules`.
        train_heads (`bool`): Whether the small modules around the layers are trained whole, as `modules_to_save`.

    Returns:
        `peft.PeftModel`

    Raises:
        ImportError: If peft is not installed.
        ValueError: If the drafter was never saved, or adapters would sit where they have no effect.
    """
    require_peft()
    from peft import get_peft_model

    refuse_prompts(peft_config)
    _refuse_changed_base(peft_config)
    base = drafter.config.name_or_path
    if not base:
        raise ValueError(
            "Adapters belong to a drafter that is saved somewhere, and this one is fresh. Save it, and load it with "
            "`AutoDrafter.from_pretrained`, or train it without `peft_config`."
        )
    # Adapters are used elsewhere than where they were trained.
    drafter.name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    peft_config = copy.deepcopy(peft_config)
    if getattr(peft_config, "target_modules", None) in (None, "all-linear"):
        peft_config.target_modules = _linears_of_layers(drafter)
    if train_heads:
        wanted = {*(getattr(peft_config, "modules_to_save", None) or ()), *_heads(drafter)}
        peft_config.modules_to_save = sorted(wanted)
    model = get_peft_model(drafter, peft_config)
    check_adapters(drafter)
    heads, adapters = trained_parameters(drafter)
    total = merged_size(drafter)
    logger.warning(
        "Training %d parameters of adapters (%.1f %% of the drafter's %d)%s.",
        adapters,
        100 * adapters / total,
        total,
        f" and {heads} of whole modules" if heads else "",
    )
    return model


def _refuse_changed_base(peft_config: "PeftConfig") -> None:
    """
    Raises:
        ValueError: If the adapters would begin by changing the weights below them, which are not saved with them.
    """
    begin = getattr(peft_config, "init_lora_weights", True)
    if isinstance(begin, str) and begin not in ("gaussian", "orthogonal"):
        raise ValueError(
            f"`init_lora_weights={begin!r}` changes the base drafter's weights or needs data first, and adapters are "
            "saved without their base: they would be loaded on other weights. Leave it out, or take 'gaussian'."
        )


def trained_parameters(drafter: Drafter) -> tuple[int, int]:
    """Trained parameters of whole modules beside adapters, and of the adapters themselves."""
    trained = [(name, p.numel()) for name, p in drafter.named_parameters() if p.requires_grad]
    whole = sum(size for name, size in trained if "modules_to_save" in name)
    return whole, sum(size for _, size in trained) - whole


def _linears_of_layers(drafter: Drafter) -> str:
    names = {name.rsplit(".", 1)[-1] for name, m in drafter.layers.named_modules() if isinstance(m, nn.Linear)}
    return rf"layers\.\d+\.(.*\.)?({'|'.join(sorted(names))})"


def _heads(drafter: Drafter) -> list[str]:
    heads = []
    for name, module in drafter.named_children():
        if name in NOT_HEADS or not any(True for _ in module.parameters()):
            continue
        heads += [f"{name}.{i}" for i in range(len(module))] if isinstance(module, nn.ModuleList) else [name]
    return heads


def leave_out_card(model: "PeftModel") -> None:
    """Keeps peft from saving its card beside the adapters: a blank form that names a folder of this machine."""
    model.create_or_update_model_card = lambda output_dir: None


def refuse_loaded_adapters(model: Any, drafter: Drafter) -> None:
    """
    Raises:
        ValueError: If the drafter carries adapters that a run could not resume.
    """
    if model is drafter and drafter.has_adapters:
        raise ValueError(
            "This drafter has adapters on it already. To train new ones, load the base drafter and pass "
            "`peft_config=`; to go on with these, pass `PeftModel.from_pretrained(base, folder, is_trainable=True)`; "
            "to train all of it, call `drafter.merge_adapters()` first."
        )
