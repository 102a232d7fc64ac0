"""
Drafts without a drafter: where a row's last tokens stood before in its text, what followed them then is copied (prompt
lookup, https://github.com/apoorvumang/prompt-lookup-decoding). Code, lists and quotations repeat themselves; a copy
costs nothing to draft, and in such places it is accepted further than what a drafter of a few layers proposes.
"""

from .sequences import Sequences


# So many last tokens must have stood before. Fewer are found more often, and their copies accepted less.
MATCHED = 3
# Share of copied tokens hoped to be accepted before anything is known, and how many tokens that hope counts for.
HOPE, TRUST = 0.75, 8
# Per round, what older experience keeps of its weight, so that copying is tried again after it did not pay.
MEMORY = 0.98


class Lookup:
    """
    Looks into the texts of one call's rows. Which tokens are copied, and whether, depends on committed tokens alone.

    Args:
        sequences ([`Sequences`]): The rows.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.texts = [sequences.prefix(place)[0].tolist() for place in range(len(sequences.live))]
        # By row, behind which token a run of `MATCHED` tokens last ended.
        self.places: list[dict[tuple[int, ...], int]] = [{} for _ in self.texts]
        self.seen = [MATCHED] * len(self.texts)
        self.accepted = self.copied = 0.0

    @property
    def acceptance(self) -> float:
        """The share of copied tokens that is accepted, given that those before them were."""
        return (self.accepted + HOPE * TRUST) / (self.copied + TRUST)

    def find(self) -> dict[int, int]:
        """By place, where a live row's last tokens were followed by something before; other rows are left out."""
        found = {}
        for place, row in enumerate(self.sequences.live):
            text, places = self.texts[row], self.places[row]
            text += self.sequences.tokens[row][len(text) - self.sequences.prompt_length :]
            for end in range(self.seen[row], len(text)):
                places[tuple(text[end - MATCHED : end])] = end
            self.seen[row] = max(len(text), MATCHED)
            start = places.get(tuple(text[-MATCHED:]))
            if start is not None:
                found[place] = start
        return found

    def copy(self, place: int, start: int, num_tokens: int) -> list[int]:
        """What followed from `start` on; what runs into the row's end goes on repeating itself."""
        text = self.texts[self.sequences.live[place]]
        period = len(text) - start
        return [text[start + k % period] for k in range(num_tokens)]

    def observe(self, verified: list[int], accepted: list[int]) -> None:
        """Of each copy of a round, how many of its tokens were verified and how many accepted."""
        reached = sum(min(v, a + 1) for v, a in zip(verified, accepted))
        self.accepted = MEMORY * self.accepted + sum(accepted)
        self.copied = MEMORY * self.copied + reached
