"""Laws of convergence: what more data per step saves, and what local steps lose of that."""

from __future__ import annotations

import math
from typing import NamedTuple


class Recipe(NamedTuple):
    """Settings of a plan, other than codecs, that affect convergence."""

    optimizer: str = "adam"
    """One of `FAMILIES`. A family without rows counts like its relative in `LIKE`; any other gets the highest cost of all."""
    codes: str = "gradients"
    every: int = 1
    overlap: str = ""
    late: bool = False
    workers: int = 4
    fragments: int = 1
    """Number of parts of the model that are exchanged one after the other."""
    numel: int = 0
    """Number of parameters of the model. 0: as many as the measured models have."""
    noise: float = 0.0
    """The gradient noise scale in batches of one worker. 0: unknown, and assumed to be large."""


class Excess(NamedTuple):
    """Convergence cost on top of dense training with an exchange in every step: additional steps and loss, median and cautious
    (`high`)."""

    steps: float = 0.0
    """Convergence factor - 1."""
    high: float = 0.0
    loss: float = 0.0
    loss_high: float = 0.0


NONE = Excess()


def steps_alone(noise: float, workers: float, numel: int = 0) -> float:
    """Steps that one worker needs with its own batch, relative to steps with the batches of `workers` workers.

    `noise`: the gradient noise scale in batches of one worker; it may be infinite. `numel`: number of parameters, for which the
    law of our long trainings applies (`LongRunLaw`); 0: the noise scale alone decides, as for large models.

    >>> round(steps_alone(1.0, 4), 2), round(steps_alone(16.0, 4), 2), round(steps_alone(math.inf, 4), 2)
    (1.6, 3.4, 4.0)
    >>> steps_alone(16.0, 4, 350_000) < steps_alone(16.0, 4, 124_000_000) == steps_alone(16.0, 4)
    True
    """
    ratio = workers if noise == math.inf else (1 + noise) / (1 + noise / workers)
    return float(ratio ** (LONG_RUNS.realised_part(numel) if numel else 1.0))


class LongRunLaw(NamedTuple):
    """What our long trainings with AdamW show for models of up to `LONG_NUMEL` parameters, in logarithms of steps.

    At a fixed learning rate, small models gain less from more data per step than the noise scale promises: they realise the
    part min(1, realised (N / 1e6)^growth), for N parameters. H local steps lose the part min(1, lost ln(1 + (H - 1) / 2)
    / ln 15.5) of it, so no number of local steps takes longer than one worker alone. (H - 1) / 2 is the mean number of its own
    steps that a worker has taken since the last exchange, and 15.5 belongs to 30 local steps, so these lose the part `lost`.
    An overlapped exchange of F fragments is merged H / F steps late. A step of delay counts as `late` own steps.

    The trainings have 2 to 8 workers; for more, costs are extrapolated. `python -m bench longrun-law` has the fit, and its
    error on each task when the fit omits that task.
    """

    realised: float
    growth: float
    lost: float
    late: float

    def realised_part(self, numel: int) -> float:
        return float(min(1.0, self.realised * (numel / 1e6) ** self.growth))

    def lost_part(self, every: float) -> float:
        return min(1.0, self.lost * math.log((every + 1) / 2) / math.log(15.5))

    def as_blocking(self, every: float, fragments: int) -> float:
        """Number of local steps that cost as much if their exchange blocks. 0 fragments: it blocks already."""
        return every * (1 + 2 * self.late / fragments) if fragments else every


LONG_RUNS, LONG_RUNS_HIGH = LongRunLaw(0.74, 0.14, 0.4, 0.42), LongRunLaw(0.74, 0.14, 0.46, 0.72)
"""Median law, and the cautious law: at least 80 % of the trainings need at most its factor."""


def fraction_between(numel: int, low: int, high: int) -> float:
    """0 up to `low`, 1 from `high` on, and linear over the logarithm between them."""
    return min(1.0, max(0.0, math.log(numel / low) / math.log(high / low)))


class LocalStepLaw(NamedTuple):
    """Convergence factor of local steps: ln F = scale (M - 1)^power max(LEAST_SIZE, 1 - ln(N / 2e6) / sizes) ln H / ln 30, for
    M workers, N parameters and H local steps. More workers never take longer than fewer: for m < M, F of M workers is at most M
    / m times F of m workers.

    `python -m bench published` has the published trainings, the fit, and its error on each paper when the fit omits that paper.
    """

    scale: float
    power: float
    sizes: float

    def __call__(self, workers: float, numel: float, every: float) -> float:
        size = max(LEAST_SIZE, 1 - math.log(numel / 2e6) / self.sizes)
        slope = self.scale * size * math.log(every) / math.log(30)
        return math.exp(min(slope * (fewer - 1) ** self.power + math.log(workers / fewer)
                            for fewer in (workers, *range(1, math.ceil(workers)))))


LOCAL_STEPS, LOCAL_STEPS_HIGH = LocalStepLaw(0.0948, 1.15, 9.91), LocalStepLaw(0.193, 0.889, 10.4)
"""Median law, and the law for the 80th percentile. Both are fitted to AdamW models of 35 M to 15 B parameters with 2 to 16
workers and 30 to 2000 local steps."""
LEAST_SIZE = 0.1
"""Lower limit of the law's size factor: in publications, models of 3 and 15 B parameters still needed additional steps."""
MUON = 0.4
"""Muon's ln F relative to AdamW's, as published for models of 150 M to 15 B parameters (MuLoCo, 2505.23725). A transformer of
0.36 M agrees: 0.3 to 0.55."""
LOSS_EXPONENT = 0.0477
"""Exponent from steps to loss: a model trained F times as long has a loss lower by the factor F to this power (2503.09799: L ~
N^-0.0953 at 20 tokens per parameter)."""
SHORT_NUMEL, LONG_NUMEL, PUBLISHED_NUMEL, FREE_NUMEL = 350_000, 2_300_000, 35_000_000, 124_000_000
"""Model sizes in parameters: from SHORT_NUMEL on, rows of short runs no longer count for local steps; LONG_NUMEL is the largest
model of our long trainings, PUBLISHED_NUMEL the smallest of the published ones. From FREE_NUMEL on, codecs of `FREE_KINDS` cost
no steps according to Streaming DiLoCo."""


def local_step_excess(recipe: Recipe) -> Excess:
    """Convergence cost of local steps by our long trainings and by the published law, whose trainings block, all but one.

    The published law is for noise scales far above the workers' batches. With less noise a worker's own steps are nearer to
    those of all workers, so ln F is in proportion to the logarithm of the steps that more data saves.
    """
    if recipe.workers <= 1 or (recipe.every <= 1 and recipe.overlap != "round"):
        return NONE
    workers, large = recipe.workers, fraction_between(recipe.numel, LONG_NUMEL, PUBLISHED_NUMEL)
    saved = math.log(steps_alone(recipe.noise or math.inf, workers, recipe.numel))
    if recipe.optimizer == "muon":
        saved *= MUON
    logs = []
    fragments = recipe.fragments if recipe.overlap == "round" else 0
    for own, published in ((LONG_RUNS, LOCAL_STEPS), (LONG_RUNS_HIGH, LOCAL_STEPS_HIGH)):
        every = own.as_blocking(recipe.every, fragments)  # assumed for large models, too
        part = math.log(published(workers, recipe.numel, every)) / math.log(workers)
        logs.append(saved * ((1 - large) * own.lost_part(every) + large * part))
    steps, high = logs[0], max(logs)
    return Excess(*(math.expm1(log) for log in (steps, high, LOSS_EXPONENT * steps, LOSS_EXPONENT * high)))
