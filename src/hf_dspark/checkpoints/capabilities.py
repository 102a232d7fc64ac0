"""What every format that we write can carry, in one table; the rest is refused by name."""

from dataclasses import dataclass, field
from typing import Any

from ..models.configuration_drafter import EAGLE3_LAYERS, NAMES, PARTS


KINDS = tuple(NAMES)
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
EVERY = dict.fromkeys(KINDS, ("qwen3", "llama", "gemma4_text"))


@dataclass(frozen=True)
class Capability:
    """
    What one format can say.

    Args:
        families (`dict[str, tuple[str, ...]]`): For each kind of drafter the transformer families it may have.
        all_slots (`tuple[str, ...]`): Kinds whose blocks may propose from every slot (`sample_from_anchor`).
        masks_only (`tuple[str, ...]`): Kinds whose blocks may propose from the mask slots alone.
        draft_vocabulary (`tuple[str, ...]`): Kinds that may have a reduced draft vocabulary.
        own_embedding (`tuple[str, ...]`): Kinds that may have a token embedding of their own.
        own_head (`tuple[str, ...]`): Kinds that may have an LM head of their own.
        target_width (`tuple[str, ...]`): Kinds whose target may be of another hidden size than the draft.
        windows (`tuple[tuple[bool, bool], ...]`): Sliding windows, as (`window_from_anchor`, `sliding_causal`).
        norms (`tuple[str, ...]`): Variants of EAGLE-3.
        no_serial_head (`bool`): Whether a DSpark drafter may do without its serial head.
        no_heads (`bool`): Whether it may do without its confidence head, too.
        rnn_masks_only (`bool`): Whether an RNN head of one whose masks alone propose begins at the first mask.
        copies (`dict[str, tuple[str, ...]]`): For each kind the parts that are stored even if they are the target's.
        reduced_head (`bool`): Whether the LM head of a reduced draft vocabulary is, too.
    """

    families: dict[str, tuple[str, ...]]
    all_slots: tuple[str, ...] = ()
    masks_only: tuple[str, ...] = ()
    draft_vocabulary: tuple[str, ...] = ()
    own_embedding: tuple[str, ...] = ()
    own_head: tuple[str, ...] = ()
    target_width: tuple[str, ...] = ()
    windows: tuple[tuple[bool, bool], ...] = ()
    norms: tuple[str, ...] = ()
    no_serial_head: bool = False
    no_heads: bool = False
    rnn_masks_only: bool = False
    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reduced_head: bool = True


CAPABILITIES = {
    "hf-dspark": Capability(
        families=EVERY,
        all_slots=KINDS,
        masks_only=KINDS,
        draft_vocabulary=KINDS,
        own_embedding=KINDS,
        own_head=KINDS,
        target_width=KINDS,
        windows=((False, False), (False, True), (True, False), (True, True)),
        norms=NORMS,
        no_serial_head=True,
        no_heads=True,
        rnn_masks_only=True,
        reduced_head=False,
    ),
    "deepspec": Capability(
        families=dict.fromkeys(KINDS, ("qwen3", "gemma4_text")),
        all_slots=("dspark", "dflash"),
        own_embedding=KINDS,
        own_head=KINDS,
        no_serial_head=True,
        copies=dict.fromkeys(KINDS, ("embed_tokens", "lm_head")),
    ),
    "speculators": Capability(
        families={"dspark": ("qwen3",), "dflash": ("qwen3",), "eagle3": ("qwen3", "llama")},
        all_slots=("dspark", "dflash"),
        masks_only=("dspark", "dflash"),
        draft_vocabulary=KINDS,
        own_embedding=KINDS,
        own_head=KINDS,
        target_width=KINDS,
        windows=((True, False), (True, True)),
        norms=NORMS,
        no_serial_head=True,
        no_heads=True,
        # The package leaves a missing embedding of EAGLE-3 random (0.9.0).
        copies={"eagle3": ("embed_tokens", "lm_head")},
    ),
    "sglang": Capability(
        families={"dspark": ("qwen3",), "dflash": ("qwen3",), "eagle3": ("llama",)},
        all_slots=("dspark",),
        masks_only=("dflash",),
        draft_vocabulary=("eagle3",),
        own_head=("eagle3",),
        target_width=("eagle3",),
        windows=((False, False), (False, True)),
        norms=("fc_norm",),
    ),
    "zlab": Capability(families={"dflash": ("qwen3",)}, masks_only=("dflash",), windows=((False, False),)),
}


def refusals(config: Any, target_format: str, mere_copies: bool = False) -> list[str]:
    """
    Why a format can't carry a drafter.

    Args:
        config (`DrafterConfig`): The drafter's.
        target_format (`str`): One of `CAPABILITIES`.
        mere_copies (`bool`, *optional*, defaults to `False`): Whether the drafter's own embedding and LM head are to
            be taken for copies of the target's, which are dropped once it is attached.

    Returns:
        `list[str]`: The reasons, none if it can.
    """
    able, kind = CAPABILITIES[target_format], config.model_type
    name = NAMES[kind]
    if kind not in able.families:
        carried = " and ".join(NAMES[k] for k in able.families)
        return [f"it holds {carried} drafters only, this one is {name}"]
    reasons = [*_transformer_refusals(config, able, kind)]
    reasons += [] if mere_copies else _part_refusals(config, able, kind)
    return reasons + (_eagle_refusals(config, able) if kind == "eagle3" else _block_refusals(config, able, kind))


def copied_parts(config: Any, target_format: str) -> list[str]:
    """The parts that the format stores and this drafter borrows: copies of the target's."""
    able = CAPABILITIES[target_format]
    wanted = set(able.copies.get(config.model_type, ()))
    if able.reduced_head and config.draft_vocab_size:
        wanted.add("lm_head")
    borrowed = {"embed_tokens": not config.own_embedding, "lm_head": not config.own_head}
    return [part for part in PARTS if part in wanted and borrowed[part]]


def needs_target(config: Any, target_format: str) -> str | None:
    """What the format says of the target and this drafter leaves to it, so that it must be attached first."""
    copies = copied_parts(config, target_format)
    if copies:
        parts = " and ".join(PARTS[part] for part in copies)
        return f"stores copies of the target's {parts}, which this drafter borrows"
    if target_format != "hf-dspark" and not config.vocab_size:
        return "names the size of the vocabulary, which this checkpoint leaves to its target"
    if target_format == "deepspec" and config.target_layer_ids == EAGLE3_LAYERS:
        return "names the feature layers, which this checkpoint leaves to its target"
    return None


def _transformer_refusals(config: Any, able: Capability, kind: str) -> list[str]:
    reasons, family = [], config.text_config.model_type
    if family not in able.families[kind]:
        families = " or ".join(able.families[kind])
        reasons.append(f"its {NAMES[kind]} drafters have {families} layers, this one has {family} layers")
    if config.target_hidden_size != config.hidden_size and kind not in able.target_width:
        sizes = f"{config.target_hidden_size} and {config.hidden_size}"
        reasons.append(f"target and drafter have one hidden size there, here they have {sizes}")
    if config.draft_vocab_size and kind not in able.draft_vocabulary:
        reasons.append(f"it has no reduced draft vocabulary for {NAMES[kind]} (`draft_vocab_size`)")
    return reasons


def _part_refusals(config: Any, able: Capability, kind: str) -> list[str]:
    own = {
        "embed_tokens": config.own_embedding and kind not in able.own_embedding,
        "lm_head": config.own_head and kind not in able.own_head,
    }
    parts = " and ".join(PARTS[part] for part in PARTS if own[part])
    if not parts:
        return []
    return [
        f"its readers always take the target's {parts}, and this drafter has its own (mere copies are dropped once "
        "the target is attached: `drafter.attach(target)`, on the command line --target)"
    ]


def _block_refusals(config: Any, able: Capability, kind: str) -> list[str]:
    reasons = []
    if config.sample_from_anchor and kind not in able.all_slots:
        reasons.append("only the mask slots of a block propose there (`sample_from_anchor` is True here)")
    if not config.sample_from_anchor and kind not in able.masks_only:
        reasons.append("every slot of a block proposes there (`sample_from_anchor` is False here)")
    sliding = any(map(config.is_sliding, range(config.num_hidden_layers)))
    window = (config.window_from_anchor, config.sliding_causal)
    if sliding and window not in able.windows:
        given = f"`window_from_anchor` {window[0]} and `sliding_causal` {window[1]}"
        reasons.append(f"it has no sliding layers with {given}")
    if not config.sample_from_anchor and not able.rnn_masks_only and getattr(config, "markov_head_type", "") == "rnn":
        reasons.append("the state of its RNN head begins at the anchor's slot, and here at the first mask")
    if kind == "dspark" and not config.markov_rank and not able.no_serial_head:
        reasons.append("its DSpark drafters have a serial head (`markov_rank` is 0 here)")
    elif kind == "dspark" and not config.markov_rank and not config.enable_confidence_head and not able.no_heads:
        reasons.append("a DSpark drafter without serial and confidence head is taken for DFlash there")
    return reasons


def _eagle_refusals(config: Any, able: Capability) -> list[str]:
    return [f"it can't say `{norm}`" for norm in NORMS if getattr(config, norm) and norm not in able.norms]


def table() -> list[dict[str, str]]:
    """The capabilities as rows for people: the format, what it carries of each kind, and what it stores besides."""
    return [{"format": name, **_described(able)} for name, able in CAPABILITIES.items()]


def _described(able: Capability) -> dict[str, str]:
    cells = {NAMES[kind]: "no" for kind in KINDS}
    for kind, families in able.families.items():
        words = [", ".join(families)]
        if kind != "eagle3" and (kind in able.all_slots) != (kind in able.masks_only):
            words.append("all slots" if kind in able.all_slots else "masks only")
        words.append("any vocabulary" if kind in able.draft_vocabulary else "full vocabulary")
        if kind == "eagle3" and able.norms != NORMS:
            words.append(", ".join(able.norms) or "no norm variants")
        cells[NAMES[kind]] = "; ".join(words)
    return cells | {"sliding layers": _windows(able), "own embedding, head": _own(able), "copies": _copies(able)}


def _windows(able: Capability) -> str:
    origins = {"anchor" if from_anchor else "slot" for from_anchor, _ in able.windows}
    if not origins:
        return "no"
    causal = "" if any(causal for _, causal in able.windows) else ", both ways"
    return f"from the {' or '.join(sorted(origins))}{causal}"


def _own(able: Capability) -> str:
    if set(able.own_embedding) == set(able.own_head):
        return "yes" if able.own_embedding else "no"
    return "head of " + ", ".join(NAMES[kind] for kind in able.own_head)


def _copies(able: Capability) -> str:
    words = [f"{PARTS[part]} of {_kinds(able, part)}" for part in PARTS if _kinds(able, part)]
    if able.reduced_head and able.draft_vocabulary:
        words.append("LM head of a reduced vocabulary")
    return "; ".join(words) or "none"


def _kinds(able: Capability, part: str) -> str:
    kinds = [NAMES[kind] for kind, parts in able.copies.items() if part in parts]
    return "all" if len(kinds) == len(KINDS) else ", ".join(kinds)
