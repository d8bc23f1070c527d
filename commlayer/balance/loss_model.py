"""Loss penalty of codecs by ratio, as measured by proxy runs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput, RecordError
from commlayer.files import write_whole
from commlayer.records import Record, decode, encode


class LossPoint(Record, frozen=True):
    """A codec's measured loss penalty: the relative increase of the loss over dense training, on the same batch if that was
    tried. 0.01 means one per cent."""

    codec: str
    """Name of the codec's family, for example "topk"."""
    ratio: float
    penalty: float


class LossModel(Record, frozen=True):
    """Loss penalties of codecs by compression ratio, interpolated over log(ratio). A smaller ratio never has a smaller
    penalty."""

    points: tuple[LossPoint, ...]

    def penalty(self, codec: str, ratio: float = 1.0) -> float:
        """Returns the relative loss penalty of a codec, given by name or spelling. Infinite for an unmeasured codec, or below
        the smallest measured ratio."""
        curve = self._curve(family(codec))
        if not curve or ratio < curve[0][0] * (1 - 1e-9):
            return math.inf
        if ratio >= curve[-1][0]:
            return curve[-1][1]
        (r0, p0), (r1, p1) = next(pair for pair in itertools.pairwise(curve) if ratio <= pair[1][0])
        way = max(0.0, math.log(ratio / r0)) / math.log(r1 / r0)
        return (1 - way) * p0 + way * p1  # exact at both ends, because `least_ratio` compares with measured values

    def least_ratio(self, codec: str, budget: float) -> float | None:
        """Returns the smallest ratio whose penalty is within the budget. Returns None if no measured ratio stays within the
        budget."""
        curve = self._curve(family(codec))
        inside = [i for i, (_, penalty) in enumerate(curve) if penalty <= budget]
        if not inside:
            return None
        i = inside[0]
        if i == 0:
            return curve[0][0]
        (r0, p0), (r1, p1) = curve[i - 1], curve[i]
        return float(r1 * (r0 / r1) ** ((budget - p1) / (p0 - p1)))

    def _curve(self, name: str) -> list[tuple[float, float]]:
        """Returns the codec's points (ratio, penalty) sorted by ratio. A penalty below that of a larger ratio is raised to
        that one."""
        ratios = sorted({p.ratio for p in self.points if p.codec == name}, reverse=True)
        curve: list[tuple[float, float]] = []
        for ratio in ratios:
            same = [p.penalty for p in self.points if p.codec == name and p.ratio == ratio]
            curve.append((ratio, max(sum(same) / len(same), curve[-1][1] if curve else 0.0)))
        return curve[::-1]


def family(codec: str) -> str:
    """Returns the family of a codec given by name or spelling: "topk" for "error_feedback(topk(ratio=0.01))"."""
    return codec if codec.isidentifier() else parse_spec(codec).core.family


def write(path: Path, model: LossModel) -> None:
    write_whole({path: encode(model) + b"\n"})


def read(path: Path) -> LossModel:
    """Reads a model that `write` wrote. Raises a ValueError of one line for an invalid file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidInput("E-LOSS-MODEL", f"loss model {path}: {error.strerror}; create one with `commlayer tune`") from None
    try:
        model = decode(data, LossModel, f"loss model {path}")
    except RecordError as error:
        raise RecordError("E-LOSS-MODEL", f"{error.what}; create a loss model with `commlayer tune`") from None
    if not model.points:
        raise InvalidInput("E-LOSS-MODEL", f"loss model {path}: has no points; measure some with `commlayer tune`")
    for point in model.points:
        if not 0 < point.ratio <= 1:
            raise InvalidInput("E-LOSS-MODEL",
                               f"loss model {path}: ratio of {point.codec} is {point.ratio:g}, allowed: above 0, up to 1")
        if not math.isfinite(point.penalty):
            raise InvalidInput("E-LOSS-MODEL",
                               f"loss model {path}: penalty of {point.codec} is {point.penalty}, allowed: a finite number")
    return model
