"""
Keys and values of sequences of different lengths. A row's token at position `p` has slot `p`, whatever the lengths of
the other rows are: each row writes behind its own end, and nothing is shifted, copied or left as a hole. A layer that
looks back no further than a window keeps its last positions alone, in slot `p` modulo its size.
"""

from collections.abc import Callable

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class Layout:
    """
    Where the tokens of a packed forward belong: row after row, `counts[r]` tokens at positions from `starts[r]` on.

    Args:
        starts, counts (`list[int]`): Per row.
        device (`torch.device`): Where the tensors live.

    Attributes:
        rows, positions (`torch.LongTensor` of shape `(tokens,)`): Row and position of every token.
    """

    def __init__(self, starts: list[int], counts: list[int], device: torch.device) -> None:
        self.starts, self.counts = starts, counts
        self.longest, self.total, self.end = max(counts), sum(counts), max(map(sum, zip(starts, counts)))
        self.is_even = min(counts) == self.longest
        flat = [(row, start + k, k) for row, (start, n) in enumerate(zip(starts, counts)) for k in range(n)]
        self.rows, self.positions, self._columns = torch.tensor(flat, device=device).view(-1, 3).unbind(1)
        self._bounds = torch.tensor([starts, [a + n for a, n in zip(starts, counts)]], device=device)
        self._kept: dict[tuple, torch.Tensor] = {}

    @property
    def start_of_rows(self) -> torch.Tensor:
        """First position of every row, `(rows,)`."""
        return self._bounds[0]

    def keep(self, key: tuple, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` gives, made once: the layers of a model ask for the same masks and places."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def last_tokens(self) -> torch.Tensor:
        """Index of every row's last token among all, `(rows,)`."""
        return torch.tensor(self.counts, device=self.rows.device).cumsum(0) - 1

    def tail(self, most: int) -> tuple[torch.Tensor, "Layout"] | None:
        """The index and the layout of each row's last `most` tokens; `None` if that is all of them."""
        if self.longest <= most:
            return None
        counts = [min(n, most) for n in self.counts]
        starts = [start + n - kept for start, n, kept in zip(self.starts, self.counts, counts)]
        index = (self.positions >= torch.tensor(starts, device=self.rows.device)[self.rows]).nonzero()[:, 0]
        return index, Layout(starts, counts, self.rows.device)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Packed `[1, heads, tokens, dim]` -> `[rows, heads, longest, dim]`; what fills shorter rows means nothing."""
        x = x[0]
        if not self.is_even:
            places = self.keep(("unpack",), self._unpacking)
            x = x.index_select(1, places)
        return x.view(x.shape[0], len(self.counts), self.longest, x.shape[2]).transpose(0, 1)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, longest, ...]` -> packed `[1, tokens, ...]`."""
        x = x.flatten(0, 1)
        if not self.is_even:
            x = x.index_select(0, self.keep(("pack",), lambda: self.rows * self.longest + self._columns))
        return x[None]

    def _unpacking(self) -> torch.Tensor:
        places = self.rows.new_zeros(len(self.counts), self.longest)
        places[self.rows, self._columns] = torch.arange(self.total, device=places.device)
        return places.flatten()

    def slot_positions(self, slots: int, ring: int | None) -> torch.Tensor:
        """
        The position that each of a layer's first `slots` slots holds once this forward is written, `(rows, slots)`;
        negative or past a row's end where it holds none. `ring` is the layer's size if it keeps its last positions.
        """
        index = torch.arange(slots, device=self.rows.device)[None]
        if ring is None:
            return index
        last = self._bounds[1][:, None] - 1
        return last - (last - index) % ring

    def causal_mask(self, slots: int, ring: int | None, window: int | None) -> torch.Tensor:
        """
        Which slots each token of a row sees: those of its own row up to itself, less than `window` away.

        Returns:
            `torch.BoolTensor` of shape `(rows, 1, longest, slots)`.
        """

        def make() -> torch.Tensor:
            held = self.slot_positions(slots, ring)[:, None]
            queries = (self._bounds[0][:, None] + torch.arange(self.longest, device=held.device))[..., None]
            seen = held <= queries
            if ring is not None:
                seen = seen & (held >= 0)
            if window is not None:
                seen = seen & (held > queries - window)
            return seen[:, None]

        return self.keep(("causal", slots, ring, window), make)


class RowLayer(CacheLayerMixin):
    """
    One layer's keys and values, stored as `[rows, slots, heads, dim]`.

    Args:
        size (`int`, *optional*): Keeps each row's last `size` positions; all of them by default.
    """

    is_croppable = True

    def __init__(self, size: int | None = None, window: int | None = None) -> None:
        super().__init__()
        self.ring, self.window = size, window
        self.is_sliding = size is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is known about the number of rows here: `write` makes the storage."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> None:
        """Keys and values `[..., heads, tokens, dim]` of a layout's tokens, to their rows and positions."""
        self._make_room(keys, values, layout)
        if self.ring is not None and layout.longest > self.ring:
            index, layout = layout.tail(self.ring)
            keys, values = (x.transpose(1, 2).flatten(0, 1)[index] for x in (keys, values))
        else:
            keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
        if len(layout.counts) == 1 and self.ring is None:
            slots = slice(layout.starts[0], layout.starts[0] + layout.total)
            self.keys[0, slots], self.values[0, slots] = keys, values
            return
        size = self.keys.shape[1]
        places = layout.keep(
            ("places", size, self.ring),
            lambda: layout.rows * size + (layout.positions if self.ring is None else layout.positions % size),
        )
        for stored, new in ((self.keys, keys), (self.values, values)):
            stored.flatten(0, 1).index_copy_(0, places, new.to(stored.dtype))

    def read(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[rows, heads, slots, dim]` of the layout's rows, as views."""
        rows, slots = len(layout.counts), self.num_slots(layout)
        return self.keys[:rows, :slots].transpose(1, 2), self.values[:rows, :slots].transpose(1, 2)

    def num_slots(self, layout: Layout) -> int:
        """Slots in use once the layout's tokens are written."""
        return layout.end if self.ring is None else min(layout.end, self.ring)

    def move(self, source: int, to: int) -> None:
        """Puts one row in another's place."""
        if self.is_initialized:
            self.keys[to], self.values[to] = self.keys[source], self.values[source]

    def _make_room(self, keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> None:
        have = self.keys.shape[1] if self.is_initialized else 0
        need = self.num_slots(layout) if self.ring is None else self.ring
        if need <= have:
            return
        size = self.ring or max(need + 64, have + have // 2)
        grown = []
        for old, new in ((self.keys, keys), (self.values, values)):
            rows = old.shape[0] if have else len(layout.counts)
            # Zeros, because what is masked must still be finite.
            room = new.new_zeros(rows, size, new.shape[1], new.shape[3])
            if have:
                room[:, :have] = old
            grown.append(room)
        self.keys, self.values = grown
        self.is_initialized = True

    # What transformers asks of a layer; lengths differ between rows, so `RowCache` answers for all.

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> None:
        raise NotImplementedError("A `RowLayer` is written through its `RowCache`.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise NotImplementedError("The mask of a `RowCache` comes from its layout.")

    def get_seq_length(self) -> int:
        raise NotImplementedError("The rows of a `RowCache` have their own lengths.")

    def get_max_length(self) -> int:
        return -1 if self.ring is None else self.ring


class RowCache(Cache):
    """
    A cache whose rows have their own lengths.

    `open` says which tokens come next, `update` writes and reads a layer of them, `commit` makes them (or some of
    them) part of the rows; what is not committed is written over later.

    Args:
        layers (`list[RowLayer]`): The layers.
        lengths (`list[int]`, *optional*): Tokens in each row; none by default, in as many rows as come first.

    Attributes:
        lengths (`list[int]`): Committed tokens of each row.
        layout ([`Layout`], *optional*): The tokens of the forward that is on.
    """

    def __init__(self, layers: list[RowLayer], lengths: list[int] | None = None) -> None:
        super().__init__(layers=layers)
        self.lengths = lengths or []
        self.layout: Layout | None = None

    def open(self, counts: list[int], device: torch.device, ahead: int = 0) -> Layout:
        """The next forward's layout: `counts[r]` tokens of each row, `ahead` positions behind the committed ones."""
        self.lengths = self.lengths or [0] * len(counts)
        self.layout = Layout([length + ahead for length in self.lengths], counts, device)
        return self.layout

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        layer.write(key_states, value_states, self.layout)
        return layer.read(self.layout)

    def commit(self, counts: list[int]) -> None:
        """Adds the first `counts[r]` tokens of the open layout to each row."""
        self.lengths = [length + n for length, n in zip(self.lengths, counts)]

    def drop_row(self, row: int) -> None:
        """Takes a row out; the last row takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self.layers:
                if isinstance(layer, RowLayer):
                    layer.move(last, row)
        self.lengths[row] = self.lengths[last]
        del self.lengths[last]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)
