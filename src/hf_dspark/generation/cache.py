"""The target's cache across rounds: it always ends right before the anchor."""

from transformers import Cache


def prepare_for_rollback(cache: Cache) -> None:
    """
    Makes the prefilled cache able to forget rejected drafts.

    Raises:
        ValueError: If it can't, as with recurrent or linear attention.
    """
    if not cache.is_croppable:
        raise ValueError(
            "The target's cache can't be rolled back (recurrent or linear attention, or a full sliding window in a "
            "static cache), so rejected drafts couldn't be forgotten. Call `generate` without `assistant_model`, or "
            "with a dynamic cache."
        )
    cache.activate_past_recording()


def forget_rejected(cache: Cache, num_verified: int, num_committed: int) -> None:
    """After a forward over the anchor and `num_verified` drafts, keeps what `num_committed` new tokens leave valid."""
    # Also called with nothing to remove: sliding-window layers trim themselves then.
    cache.crop(-(num_verified + 1 - num_committed))
