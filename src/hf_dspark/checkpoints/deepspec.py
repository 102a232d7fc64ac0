"""
Checkpoints of deepseek-ai/DeepSpec, for Qwen3 and Gemma 4 targets. Their `model_type` is the target's, the drafter
shows in `architectures` alone, and a DFlash drafter is a DSpark one without heads. They always hold copies of the
target's embedding and LM head.
"""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import AutoConfig

from ..models import configuration_gemma4 as gemma4
from ..models.configuration_checks import require_possible
from ..models.eagle3.configuration_eagle3 import Eagle3Config
from .fields import (
    architecture,
    heads,
    refuse_convention,
    required,
    stored_dtype,
    taken_from_class,
    transformer,
    unknown_fields,
    whole_number,
)
from .writing import given, named_layers, transformer_fields


BLOCK_ARCHITECTURES = {"Qwen3DSparkModel", "Gemma4DSparkModel"}
EAGLE_ARCHITECTURES = {"Qwen3Eagle3Model", "Gemma4Eagle3Model"}
# How the names of their classes begin, by the family of the transformer.
FAMILIES = {"qwen3": "Qwen3", "gemma4_text": "Gemma4"}
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}

# Fields of their config that describe the drafter rather than the transformer.
DRAFTER_FIELDS = {
    "block_size",
    "confidence_head_with_markov",
    "draft_num_hidden_layers",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "num_anchors",
    "num_target_layers",
    "sample_from_anchor",
    "step_loss_decay",
    "target_layer_ids",
    "target_model_name_or_path",
    "target_model_type",
    "target_text_model_type",
    "ttt_length",
}


def recognise(config: dict[str, Any]) -> str | None:
    """Our model type for a config.json of DeepSpec's."""
    name = architecture(config)
    if name in EAGLE_ARCHITECTURES:
        return "eagle3"
    if name in BLOCK_ARCHITECTURES:
        return "dspark" if config.get("markov_rank") or config.get("enable_confidence_head") else "dflash"
    return None


def read_config(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Our config fields for their config.json."""
    assumed: dict[str, str] = {}
    fields = {
        "text_config": _transformer(config, assumed),
        "target_layer_ids": config.get("target_layer_ids"),
        "num_target_layers": config.get("num_target_layers"),
        "target_name_or_path": config.get("target_model_name_or_path"),
        "dtype": stored_dtype(config),
        "own_embedding": True,
        "own_head": True,
        "assumed": assumed,
        "source_format": "deepspec",
    }
    kind = recognise(config)
    if kind == "eagle3":
        if whole_number("ttt_length", config) is None:
            assumed["num_drafts"] = f"{Eagle3Config.num_drafts}: the config has no `ttt_length`; a choice of ours"
        return fields | _present(config, num_drafts="ttt_length", step_loss_decay="step_loss_decay")
    # All slots of a block propose in this project; the config does not say so.
    refuse_convention(config, "sample_from_anchor", True)
    fields |= {name: required(name, config) for name in ("block_size", "mask_token_id")} | {"sample_from_anchor": True}
    return fields if kind == "dflash" else fields | heads(shapes, assumed, config)


def _transformer(config: dict[str, Any], assumed: dict[str, str]) -> dict[str, Any]:
    if config.get("model_type") not in gemma4.TEXT_TYPES:
        return transformer(config, assumed, DRAFTER_FIELDS)
    # Their rotary parameters hold those of each kind of layer and, beside them, unset ones that mean nothing.
    rope = {kind: p for kind, p in required("rope_parameters", config).items() if isinstance(p, dict)}
    required("rope_type", required(gemma4.FULL, rope))
    required("layer_types", config)
    if "per_layer_config" not in config:
        required("global_head_dim", config)
    text = {k: v for k, v in config.items() if k not in DRAFTER_FIELDS} | {"rope_parameters": rope}
    require_possible(text)
    gemma4.refuse_what_no_draft_has(text)
    taken_from_class(text, assumed, "rms_norm_eps", "hidden_activation")
    theirs = AutoConfig.for_model(**text)
    kept = {name: getattr(theirs, name) for name in unknown_fields(theirs)}
    return {"model_type": "gemma4_text"} | gemma4.draft_fields(theirs, theirs.num_hidden_layers) | kept


def _present(config: dict[str, Any], **names: str) -> dict[str, Any]:
    return {ours: config[theirs] for ours, theirs in names.items() if config.get(theirs) is not None}


def read_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Our state dict of theirs: the names are the same."""
    return state_dict


def write_config(config: Any, keys: Collection[str]) -> dict[str, Any]:
    """Their config.json for our config."""
    family, kind = FAMILIES[config.text_config.model_type], config.model_type
    fields = _write_transformer(config) | {"target_layer_ids": named_layers(config)}
    fields |= given(num_target_layers=config.num_target_layers, target_model_name_or_path=config.target_name_or_path)
    if kind == "eagle3":
        fields |= {"draft_num_hidden_layers": 1, "ttt_length": config.num_drafts}
        fields |= {"step_loss_decay": config.step_loss_decay}
        return fields | {"architectures": [f"{family}Eagle3Model"]}
    fields |= {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    heads = {name: getattr(config, name) for name in HEADS} if kind == "dspark" else NO_HEADS
    return fields | heads | {"architectures": [f"{family}DSparkModel"]}


def _write_transformer(config: Any) -> dict[str, Any]:
    fields = transformer_fields(config)
    if config.text_config.model_type != "gemma4_text":
        return fields
    # What our config has once for all layers, they have for each kind; sliding layers there are none.
    fields |= {"global_head_dim": fields["head_dim"], "num_global_key_value_heads": fields["num_key_value_heads"]}
    return {k: v for k, v in fields.items() if k != "per_layer_config"}


def write_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Their state dict of ours: the names are the same."""
    return state_dict
