"""What the readers of several formats share: finding fields, translating the transformer and the draft vocabulary."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..models.configuration_checks import require_object, require_possible
from ..models.configuration_drafter import NAMES


# Of a config.json, what describes its file rather than the transformer.
BOOKKEEPING = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",  # often copied from the target; quantized weights themselves have keys that we refuse
    "torch_dtype",
    "transformers_version",
}

# What other projects' configs sometimes leave out, and their code takes from the transformer's class.
TAKEN_FROM_CLASS = (
    "rms_norm_eps",
    "hidden_act",
    "hidden_activation",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
# Fields of any config.json that hold fields of their own.
OBJECTS = (
    "dflash_config",
    "eagle_config",
    "rope_parameters",
    "rope_scaling",
    "speculators_config",
    "text_config",
    "transformer_layer_config",
    "verifier",
)
# Known beside the fields of the config classes.
OLDER_NAMES = {"head_dim", "mlp_bias", "model_type", "rope_scaling", "rope_theta"}


def architecture(config: dict[str, Any]) -> str | None:
    """The class that a config.json names."""
    return next(iter(config.get("architectures") or []), None)


def one_value(name: str, *places: dict[str, Any]) -> Any:
    """
    A field that may stand in several places of a config; `None` if it is in none.

    Raises:
        ValueError: If two places contradict each other.
    """
    found = [place[name] for place in places if place.get(name) is not None]
    if any(value != found[0] for value in found[1:]):
        raise ValueError(f"`{name}` is given twice and differently: {found}. Correct the wrong one.")
    return found[0] if found else None


def required(name: str, *places: dict[str, Any]) -> Any:
    """
    As [`one_value`], for what can't be guessed.

    Raises:
        ValueError: If the field is missing.
    """
    value = one_value(name, *places)
    if value is None:
        raise ValueError(f"`{name}` is missing, and a wrong guess would draft badly without any error. Add it.")
    return value


def flag(name: str, *places: dict[str, Any]) -> bool | None:
    """
    As [`one_value`], for what is true or false.

    Raises:
        ValueError: If it is something else: `"false"` would be taken for true.
    """
    value = one_value(name, *places)
    if value is not None and type(value) is not bool:
        raise ValueError(f"`{name}` {value!r} must be true or false.")
    return value


def whole_number(name: str, *places: dict[str, Any]) -> int | None:
    """
    As [`one_value`], for counts.

    Raises:
        ValueError: If it is no whole number of at least 1.
    """
    value = one_value(name, *places)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"`{name}` {value!r} must be a whole number of at least 1.")
    return value


def refuse_misshapen(config: dict[str, Any]) -> None:
    """
    Refuses a config.json whose parts are not what every format has them as.

    Raises:
        ValueError: Naming the field.
    """
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in OBJECTS:
            if part.get(name) is not None:
                require_object(name, part[name])
        kind = part.get("model_type")
        if kind is not None and not isinstance(kind, str):
            raise ValueError(f"`model_type` {kind!r} must be a name.")


def unknown_fields(config: PreTrainedConfig) -> set[str]:
    """Fields that the class of a config doesn't have."""
    known = {f.name for f in dataclasses.fields(config)} | OLDER_NAMES | BOOKKEEPING
    return {name for name in vars(config) if name not in known and not name.startswith("_")}


def refuse_unknown(known: Collection[str], where: str, fields: dict[str, Any]) -> None:
    """
    Refuses fields that may change numbers in ways that we don't know; unset ones don't.

    Raises:
        ValueError: Naming them.
    """
    unknown = {k: v for k, v in fields.items() if k not in known and v not in (None, False)}
    if unknown:
        raise ValueError(
            f"{where} has fields that this hf-dspark doesn't know: {unknown}. The checkpoint is of a newer version or "
            "another method; leaving them out could change what it drafts. Update hf-dspark."
        )


def refuse_convention(config: dict[str, Any], name: str, theirs: Any) -> None:
    """
    Refuses a config that contradicts what its format always means.

    Raises:
        ValueError: If the field is given with another value.
    """
    given = config.get(name)
    if given is not None and given != theirs:
        raise ValueError(f"`{name}` is {given}, but checkpoints of this format always mean {theirs}. Correct one.")


def refuse_two_rotaries(config: dict[str, Any]) -> None:
    """
    Refuses rotary settings given by both their older and their newer name, and differently, wherever they stand.

    Raises:
        ValueError: Naming both.
    """
    for part in filter(lambda value: isinstance(value, dict), (config, *config.values())):
        older, newer = part.get("rope_scaling"), part.get("rope_parameters")
        one_value("rope_theta", part, newer or {})
        if older is not None and newer is not None and not _same_rotary(older, newer):
            raise ValueError(f"`rope_scaling` {older} contradicts `rope_parameters` {newer}. Remove the wrong one.")


def _same_rotary(older: dict[str, Any], newer: dict[str, Any]) -> bool:
    renamed = {"rope_type" if name == "type" else name: value for name, value in older.items()}
    # The base stood beside the older ones.
    return {"rope_theta": newer.get("rope_theta")} | renamed == {"rope_theta": None} | newer


def transformer(
    config: dict[str, Any],
    assumed: dict[str, str],
    drop: Collection[str] = (),
    theta: float = 10000.0,
    family: str = "qwen3",
) -> dict[str, Any]:
    """
    The fields of the draft transformer.

    Args:
        config (`dict`): Where they stand, flat.
        assumed (`dict`): Is told if the rotary base or the family is not given.
        drop (`Collection[str]`): Fields that aren't the transformer's.
        theta (`float`, *optional*, defaults to 10000): The base that the format's code takes then.
        family (`str`, *optional*, defaults to `"qwen3"`): The family of the format's layers, for a config whose
            `model_type` is the drafter's.
    """
    text = {k: v for k, v in config.items() if k not in BOOKKEEPING and k not in drop}
    require_possible(text)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if one_value("rope_theta", text, rope) is None:
        text["rope_theta"] = theta
        assumed["rope_theta"] = f"{theta}: the config has none, and this is its project's default"
    if text.get("model_type") in (None, *NAMES):
        text["model_type"] = family
        assumed["text_config.model_type"] = f"{family}: the config doesn't say, and its project's layers are of it"
    if text.get("vocab_size") is None:
        text["vocab_size"] = 0
        assumed["vocab_size"] = "that of the target: the config has none"
    _require_window(text, assumed)
    return text | taken_from_class(text, assumed, *TAKEN_FROM_CLASS) | {"tie_word_embeddings": False}


def _require_window(text: dict[str, Any], assumed: dict[str, str]) -> None:
    slides = flag("use_sliding_window", text)
    if "sliding_attention" in (text.get("layer_types") or []):
        required("sliding_window", text)
    elif slides and text.get("layer_types") is None:
        first = required("max_window_layers", text)
        required("sliding_window", text)
        assumed["layer_types"] = f"sliding from layer {first} on (`max_window_layers`): the config names none"


def taken_from_class(text: dict[str, Any], assumed: dict[str, str], *names: str) -> dict[str, Any]:
    """Fields that a config leaves to the class of its transformer, written out and recorded."""
    if text["model_type"] not in CONFIG_MAPPING:
        return {}
    fields = {f.name: f.default for f in dataclasses.fields(CONFIG_MAPPING[text["model_type"]])}
    taken = {name: fields[name] for name in names if fields.get(name) is not None and name not in text}
    for name, value in taken.items():
        assumed[name] = f"{value}: the config has none, and this is the default of {text['model_type']} transformers"
    return taken


def heads(shapes: Mapping[str, tuple[int, ...]], assumed: dict[str, str], *places: dict[str, Any]) -> dict[str, Any]:
    """
    The fields of DSpark's heads; those that no place has are read off the stored weights.

    Args:
        shapes (`dict[str, tuple]`): The stored tensors' shapes.
        assumed (`dict`): Is told what is not given.
        *places (`dict`): Where the fields may stand.
    """
    stored = _stored_heads(shapes)
    fields = {name: one_value(name, *places) for name in stored}
    for name in stored:
        if fields[name] is None:
            fields[name] = stored[name]
            if name != "confidence_head_with_markov" or fields["enable_confidence_head"]:
                assumed[name] = f"{stored[name]}: the config doesn't say, and the stored weights are of this kind"
    return fields


def _stored_heads(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    kinds = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
    confidence = shapes.get("confidence_head.proj.weight")
    return {
        "markov_rank": shapes.get("markov_head.markov_w1.weight", (0,))[-1],
        "markov_head_type": next((kind for key, kind in kinds.items() if key in shapes), "vanilla"),
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence[-1] > shapes.get("norm.weight", (0,))[0],
    }


def borrowed_or_own(keys: Collection[str]) -> dict[str, bool]:
    """Whose embedding and LM head a drafter uses: its own if the checkpoint has them."""
    return {"own_embedding": "embed_tokens.weight" in keys, "own_head": "lm_head.weight" in keys}


def stored_dtype(config: dict[str, Any]) -> str | None:
    """The type that the weights are stored in, by its new or its old name."""
    return config.get("dtype", config.get("torch_dtype"))


def reduced_size(config: dict[str, Any], vocab_size: int) -> int | None:
    """Size of the draft vocabulary, `None` if it is the target's own."""
    size = config.get("draft_vocab_size")
    if size is not None and not vocab_size:
        raise ValueError("`vocab_size` is missing, and a reduced draft vocabulary maps into it. Add it.")
    return None if size is None or size == vocab_size else size


def vocabulary_map(state_dict: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """
    The state dict with the map of the draft vocabulary as we keep it: `t2d` follows from `d2t` where only the latter
    is stored, and a map of the whole vocabulary onto itself is left out.

    Raises:
        ValueError: If a drafter of the whole vocabulary has a map that moves tokens, or `d2t` is out of range.
    """
    weights, d2t = dict(state_dict), state_dict.get("d2t")
    # What has been cast to floating point is refused with the shapes.
    if d2t is None or d2t.is_floating_point():
        return weights
    if not config.draft_vocab_size:
        if d2t.any():
            raise ValueError("`d2t` moves tokens, but `draft_vocab_size` is missing or that of the whole vocabulary.")
        return {k: v for k, v in weights.items() if k not in ("d2t", "t2d")}
    weights["d2t"] = d2t.long()
    if "t2d" in weights:
        weights["t2d"] = weights["t2d"].bool()
    else:
        ids = weights["d2t"] + torch.arange(len(d2t))
        weights["t2d"] = torch.isin(torch.arange(config.vocab_size), ids)
    return weights
