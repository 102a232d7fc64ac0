"""
Checkpoints for SGLang. It loads SpecForge's layout, which our reader of SpecForge reads again, with the heads of a
DSpark drafter repeated beside the transformer's fields. Embedding and LM head are the target's there, except for
EAGLE-3's head.
"""

from collections.abc import Collection
from typing import Any

from . import specforge, zlab
from .writing import flat_rotary, given, named_layers, transformer_fields


def write_config(config: Any, keys: Collection[str]) -> dict[str, Any]:
    """SGLang's config.json for our config."""
    if config.model_type == "eagle3":
        return _eagle_config(config, keys)
    # Named, as SpecForge does and z-lab doesn't: the two differ in what sliding layers see.
    fields = zlab.write_block_fields(config) | {"draft_vocab_size": config.vocab_size}
    if config.model_type == "dflash":
        return fields | {"architectures": [zlab.ARCHITECTURE]}
    heads = {name: getattr(config, name) for name in specforge.HEADS}
    fields["dflash_config"] |= heads | {"projector_type": "dspark"}
    return fields | heads | {"sample_from_anchor": True, "architectures": [specforge.DSPARK_ARCHITECTURE]}


def _eagle_config(config: Any, keys: Collection[str]) -> dict[str, Any]:
    fields = flat_rotary(transformer_fields(config))
    # Without a size the engine takes the target's head.
    fields |= {"draft_vocab_size": config.output_size if "lm_head.weight" in keys else None}
    fields |= given(num_target_layers=config.num_target_layers, target_hidden_size=config.target_hidden_size)
    fields["ttt_length"] = config.num_drafts
    layers = named_layers(config)
    if layers is not None:
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    return fields | {"fc_norm": config.fc_norm, "architectures": [specforge.EAGLE_ARCHITECTURE]}


def write_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """SGLang's state dict of ours."""
    if config.model_type != "eagle3":
        return state_dict
    return {key.replace("layers.0.", "midlayer.", 1): tensor for key, tensor in state_dict.items()}
