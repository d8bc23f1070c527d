"""The text of bench.tasks: Python's built-in handbook (the topics of `help()`)."""

from __future__ import annotations

import re
import zlib
from functools import cache

import torch

MIN_WORDS, STRETCH = 600, 60
"""Pages with fewer words are dropped, because held-out stretches would be too few. A stretch is a run of STRETCH words."""


@cache
def _pages() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    return tuple(topics[name] for name in sorted(topics))


def handbook() -> str:
    """About 460,000 characters of English and Python; only printable ASCII is kept."""
    return re.sub(r"[^\n -~]", "", "\n".join(_pages()))


class Passages:
    """Sequences of word ids below `words`, labelled by page. One stretch of every five is held out."""

    def __init__(self, words: int, length: int) -> None:
        split = [re.findall(r"\w+|[^\w\s]", page.lower()) for page in _pages()]
        ids = [torch.tensor([zlib.crc32(word.encode()) % words for word in page]) for page in split if len(page) >= MIN_WORDS]
        self.pages, self._length = len(ids), length
        stretches = [page.split(STRETCH) for page in ids]
        self._learnt = [torch.cat([part for i, part in enumerate(parts) if i % 5 != 2]) for parts in stretches]
        self._held = [torch.cat(parts[2::5]) for parts in stretches]

    def draw(self, samples: int, chosen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return self._taken(self._learnt, samples, chosen)

    def held(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._taken(self._held, samples, torch.Generator().manual_seed(1))

    def _taken(self, pages: list[torch.Tensor], samples: int, chosen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        which = torch.randint(len(pages), (samples,), generator=chosen)
        places = torch.rand(samples, generator=chosen)
        rows = []
        for page, place in zip(which.tolist(), places.tolist(), strict=True):
            begin = int(place * (len(pages[page]) - self._length))
            rows.append(pages[page][begin : begin + self._length])
        return torch.stack(rows), which
