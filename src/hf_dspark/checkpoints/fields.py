"""What the readers of several formats share: finding fields, translating the transformer and the draft vocabulary."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

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
    if any(value != found[0] for value in found):
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
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if one_value("rope_theta", text, rope) is None:
        text["rope_theta"] = theta
        assumed["rope_theta"] = f"{theta}: the config has none, and this is its project's default"
    if text.get("model_type") in (None, *NAMES):
        text["model_type"] = family
        assumed["text_config.model_type"] = f"{family}: the config doesn't say, and its project's layers are of it"
    return text | {"tie_word_embeddings": False}


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
