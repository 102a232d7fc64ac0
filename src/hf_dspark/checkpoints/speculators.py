"""
Checkpoints of vllm-project/speculators. The method is named in `speculators_model_type`, the transformer stands in
`transformer_layer_config`, and layer ids are one higher than ours, being indices into `hidden_states`. Positions of
EAGLE-3 begin at 1 there; rotary attention sees only differences, so it makes none. Windows are those of its training:
counted from the anchor.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ..models.eagle3.configuration_eagle3 import Eagle3Config
from . import eagle
from .fields import (
    borrowed_or_own,
    flag,
    heads,
    reduced_size,
    refuse_unknown,
    required,
    stored_dtype,
    transformer,
    vocabulary_map,
    whole_number,
)
from .writing import named_layers, transformer_fields


# The version whose layout we write.
VERSION = "0.9.0"
ARCHITECTURES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel", "eagle3": "Eagle3DraftModel"}
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
COMMON = {
    "architectures",
    "auto_map",
    "draft_vocab_size",
    "dtype",
    "model_type",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "tie_word_embeddings",
    "torch_dtype",
    "transformer_layer_config",
    "transformers_version",
}
# What only training looks at.
TRAINING = {
    "ce_loss_alpha",
    "confidence_head_alpha",
    "embed_requires_grad",
    "l1_loss_alpha",
    "loss_decay_gamma",
    "max_anchors",
    "num_anchors",
}
BLOCK = {
    "aux_hidden_state_layer_ids",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "sliding_window_non_causal",
}
KNOWN = {
    "eagle3": {*COMMON, *TRAINING, *eagle.NORMS, "eagle_aux_hidden_state_layer_ids", "ttt_length"},
    "dflash": {*COMMON, *TRAINING, *BLOCK},
    "dspark": {*COMMON, *TRAINING, *BLOCK, *HEADS},
}


def recognise(config: dict[str, Any]) -> str | None:
    """
    Our model type for a config.json of speculators'.

    Raises:
        ValueError: If it is a method that we don't know.
    """
    method = config.get("speculators_model_type")
    if method is not None and method not in KNOWN:
        raise ValueError(
            f"`speculators_model_type` {method!r} is a method that hf-dspark doesn't know; known are "
            f"{', '.join(KNOWN)}."
        )
    return method


def read_config(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Our config fields for their config.json."""
    method, assumed = config["speculators_model_type"], {}
    version = config.get("speculators_version")
    refuse_unknown(KNOWN[method], f"The config of {method!r}, written by speculators {version},", config)
    text = transformer(required("transformer_layer_config", config), assumed)
    fields = borrowed_or_own(shapes) | {
        "text_config": text,
        "draft_vocab_size": reduced_size(config, text.get("vocab_size")),
        "target_hidden_size": config.get("target_hidden_size"),
        "target_name_or_path": _verifier(config),
        "dtype": stored_dtype(config),
        "assumed": assumed,
        "source_format": "speculators",
    }
    if method == "eagle3":
        named = config.get("eagle_aux_hidden_state_layer_ids")
        layers = eagle.feature_layers(named and eagle.lower(named), assumed)
        fields |= {"target_layer_ids": layers} | _norms(config, assumed)
        # `speculative_tokens` is a default for serving; the drafter goes on for as long as it is asked to. How long it
        # was made for, only our own exports say.
        drafts = whole_number("ttt_length", config)
        return fields | {"num_drafts": drafts or max(Eagle3Config.num_drafts, *_speculative_tokens(config), 0)}
    fields |= _block_fields(config, assumed)
    if method == "dspark":
        fields |= heads(shapes, assumed, config)
    if fields.get("markov_head_type") == "rnn" and not fields["sample_from_anchor"]:
        raise ValueError(
            "`markov_head_type` 'rnn' with `sample_from_anchor` False is not available: the state of that head begins "
            "at the anchor's slot there, which proposes nothing and is left out here."
        )
    return fields


def _norms(config: dict[str, Any], assumed: dict[str, str]) -> dict[str, bool]:
    """Variants of EAGLE-3. Those that the format had not from the beginning are off where they are not named."""
    norms = {name: flag(name, config) for name in eagle.NORMS}
    # vLLM takes it for true where it is missing, and speculators for false; no weight tells.
    required("norm_before_residual", config)
    for name, value in norms.items():
        if value is None:
            norms[name] = False
            assumed[name] = "False: the config doesn't say, and this is its project's default"
    return norms


def _block_fields(config: dict[str, Any], assumed: dict[str, str]) -> dict[str, Any]:
    fields = {
        "target_layer_ids": eagle.lower(required("aux_hidden_state_layer_ids", config)),
        "mask_token_id": required("mask_token_id", config),
        "block_size": required("block_size", config),
        "sample_from_anchor": _sample_from_anchor(config, assumed),
        "window_from_anchor": True,
        "sliding_causal": not flag("sliding_window_non_causal", config),
    }
    if config.get("sliding_window_non_causal") is None and _slides(config):
        assumed["sliding_causal"] = "True: the config doesn't say, and this is its project's default"
    drafts = fields["block_size"] - (not fields["sample_from_anchor"])
    for tokens in _speculative_tokens(config):
        if tokens > drafts:
            raise ValueError(
                f"`speculative_tokens` {tokens} contradicts `block_size` "
                f"{fields['block_size']} with `sample_from_anchor` {fields['sample_from_anchor']}, which proposes "
                f"{drafts}. Correct the wrong one."
            )
    return fields


def _speculative_tokens(config: dict[str, Any]) -> list[int]:
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or []
    return [tokens for proposal in proposals if (tokens := whole_number("speculative_tokens", proposal))]


def _sample_from_anchor(config: dict[str, Any], assumed: dict[str, str]) -> bool:
    if config["speculators_model_type"] == "dflash" and config.get("sample_from_anchor") is None:
        assumed["sample_from_anchor"] = "False: DFlash configs of speculators did not always have the field"
        return False
    return required("sample_from_anchor", config)


def _slides(config: dict[str, Any]) -> bool:
    return "sliding_attention" in (config["transformer_layer_config"].get("layer_types") or [])


def _verifier(config: dict[str, Any]) -> str | None:
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def read_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Our state dict of theirs: the names are the same."""
    return vocabulary_map(state_dict, config)


def write_config(config: Any, keys: Collection[str]) -> dict[str, Any]:
    """Their config.json for our config. It has no `model_type`: engines then take it for another format."""
    method, layers = config.model_type, named_layers(config)
    theirs = layers and [i + 1 for i in layers]
    fields = {
        "architectures": [ARCHITECTURES[method]],
        "draft_vocab_size": config.output_size,
        "speculators_config": _speculation(config),
        "speculators_model_type": method,
        "speculators_version": VERSION,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": transformer_fields(config),
    }
    if method == "eagle3":
        norms = {name: getattr(config, name) for name in eagle.NORMS}
        return fields | norms | {"eagle_aux_hidden_state_layer_ids": theirs, "ttt_length": config.num_drafts}
    fields |= {name: getattr(config, name) for name in ("block_size", "mask_token_id", "sample_from_anchor")}
    fields |= {"aux_hidden_state_layer_ids": theirs, "sliding_window_non_causal": _both_ways(config)}
    return fields | ({name: getattr(config, name) for name in HEADS} if method == "dspark" else {})


def _both_ways(config: Any) -> bool:
    """Also true of a drafter without sliding layers: vLLM takes the field for all layers of a DFlash drafter."""
    return not (config.sliding_causal and any(map(config.is_sliding, range(config.num_hidden_layers))))


def _speculation(config: Any) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
    return {
        "algorithm": config.model_type,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
        "verifier": {"architectures": [], "name_or_path": config.target_name_or_path},
    }


def write_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Their state dict of ours: the names are the same."""
    return state_dict
