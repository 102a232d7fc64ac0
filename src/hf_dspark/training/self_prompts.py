"""Prompts that the target writes itself, by continuing a user turn that was just begun."""

import random
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from .chat import around_user
from .journal import Journal, seed_of
from .local_target import LocalTarget


# How prompts are sampled: wide, for variety; the answers have settings of their own.
SAMPLING = {"max_new_tokens": 128, "temperature": 1.0, "top_p": 0.97, "top_k": None}
SHORTEST = 8
# So many prompts are begun for each one asked for, before the target is taken to have no more to say.
_PATIENCE = 8


def write_prompts(
    target: LocalTarget,
    number: int,
    output: Path,
    openers: Sequence[str] = ("",),
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> list[str]:
    """
    Lets the target write prompts. Those that don't end, are shorter than 8 characters or came before are dropped.

    Args:
        target (`LocalTarget`): The target.
        number (`int`): Prompts wanted.
        output (`Path`): File that keeps what is written, so that an interrupted run goes on.
        openers (`Sequence[str]`, *optional*): How a prompt may begin; one is drawn for each. An empty one leaves it
            everything.
        batch_size (`int`, *optional*, defaults to 32): Prompts written at once.
        seed (`int`, *optional*, defaults to 0): Seed.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Returns:
        `list[str]`: The prompts, the same for a run that was interrupted.

    Raises:
        ValueError: If the target writes too few different ones.
    """
    journal, prompts = Journal(output), {}
    before, end_ids = _user_turn(target)
    config = target.generation_config(**SAMPLING)
    config.eos_token_id = sorted({*target.end_ids, *end_ids})
    done = journal.entries()
    rounds = max(4, _PATIENCE * number // batch_size)
    with tqdm(total=number, desc="Writing prompts", unit="prompt", disable=not progress) as bar:
        for i in range(rounds):
            if i < len(done):
                written = done[i]
            else:
                chance = random.Random(seed_of(seed, "openers", i))
                begun = [chance.choice(list(openers)) for _ in range(batch_size)]
                written = _write(target, before, begun, config, seed_of(seed, "prompts", i))
                journal.add(written)
            for text in written:
                prompts.setdefault(" ".join(text.lower().split()), text)
            bar.update(min(number, len(prompts)) - bar.n)
            if len(prompts) >= number:
                return list(prompts.values())[:number]
    raise ValueError(
        f"In {rounds * batch_size} attempts the target wrote {len(prompts)} different prompts of the {number} asked "
        "for. Ask for fewer, give it more openers, or give prompts of your own."
    )


def _user_turn(target: LocalTarget) -> tuple[str, list[int]]:
    """The chat up to where the user writes, and the token that ends the user's turn."""
    if not target.tokenizer.chat_template:
        raise ValueError("The tokenizer has no chat template, so there is no user turn to write prompts in.")
    before, after = around_user(target.tokenizer)
    return before, target.tokenizer(after, add_special_tokens=False)["input_ids"][:1]


def _write(target: LocalTarget, before: str, openers: list[str], config, seed: int) -> list[str]:
    tokenizer = target.tokenizer
    begun = [tokenizer(before + opener, add_special_tokens=False)["input_ids"] for opener in openers]
    written = []
    for opener, ids in zip(openers, target.continue_all(begun, config, seed)):
        text = (opener + tokenizer.decode(ids[:-1], skip_special_tokens=True)).strip()
        if ids[-1] in config.eos_token_id and len(text) >= SHORTEST:
            written.append(text)
    return written
