"""
Checkpoints of sgl-project/SpecForge. DFlash and DSpark follow z-lab's layout, but their sliding layers are causal
inside a block; DSpark has its heads described in `dflash_config`, and all slots of a block propose. EAGLE-3 carries
its own embedding and a reduced LM head.
"""

from collections.abc import Mapping
from typing import Any

from . import eagle, zlab
from .fields import architecture, flag, heads, refuse_convention, refuse_unknown, required


EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle3"
DSPARK_ARCHITECTURE = "DSparkDraftModel"
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# Of `dflash_config`, what is only for training.
TRAINING = {"confidence_head_alpha"}


def recognise(config: dict[str, Any]) -> str | None:
    """Our model type for a config.json of SpecForge's."""
    name = architecture(config)
    if name == EAGLE_ARCHITECTURE:
        return "eagle3"
    if name == DSPARK_ARCHITECTURE and "dflash_config" in config:
        return "dspark"
    # Here, and not in z-lab's own files, the draft vocabulary is always named.
    return "dflash" if name == zlab.ARCHITECTURE and "draft_vocab_size" in config else None


def read_config(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Our config fields for their config.json."""
    kind = recognise(config)
    if kind == "eagle3":
        # Their `norm_output` is not ours: what is fed back is never normed here.
        fields = eagle.read_config({k: v for k, v in config.items() if k not in ("fc_norm", "norm_output")}, shapes)
        return fields | {"fc_norm": bool(flag("fc_norm", config)), "source_format": "specforge"}
    nested = required("dflash_config", config)
    known = {*zlab.NESTED, *HEADS, *TRAINING, "projector_type", "attention_mode"}
    refuse_unknown(known, "`dflash_config`", nested)
    refuse_convention(nested, "projector_type", kind)
    refuse_convention(nested, "attention_mode", "gqa")
    refuse_convention(config, "sample_from_anchor", kind == "dspark")
    refuse_convention(config, "draft_vocab_size", config.get("vocab_size"))
    flat = {k: v for k, v in config.items() if k not in HEADS}
    fields = zlab.block_fields(flat, shapes, sliding_causal=True)
    if kind == "dspark":
        # SGLang reads them beside the transformer's fields.
        fields |= heads(shapes, fields["assumed"], nested, config)
    return fields | {"sample_from_anchor": kind == "dspark", "source_format": "specforge"}


def read_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Our state dict of theirs."""
    return eagle.read_weights(state_dict, config) if config.model_type == "eagle3" else state_dict
