"""The convergence model: how many more steps a training recipe needs to the same loss than dense synchronous training.

    excess(rows, "topk(ratio=0.01)", Recipe("adam", every=4)).high     # 0.2: a cautious fifth more steps than dense needs
    one_worker_factor(rows, "adam", 3, noise=85)                       # 2.9: steps of one worker alone relative to 3 workers

It has three parts, each with its own source.

More data per step. Training with batch B needs 1 + noise_scale / B times as many steps as with an unlimited batch (McCandlish
et al., 1812.06162). This law estimates one worker alone relative to several. Small models gain less than that (`LongRunLaw`).

Local steps. They lose a part of what the data of several workers gains. For models of at least `PUBLISHED_NUMEL` parameters, a
law fitted to published trainings (`LocalStepLaw`) gives this part; up to `LONG_NUMEL` parameters, one fitted to our own
long trainings does (`LongRunLaw`). For models as small as those of the short runs, the measured rows do. Between these sizes
the costs are blended. Rows measured on the user's own model are used without the laws.

Codecs and delays. Measured rows on small models, in short runs at a constant learning rate. Measured points are returned as
measured, made monotonic: a smaller ratio or more local steps never cost less. Between measured points, values are interpolated
over log(ratio) and log2(every). An unmeasured combination costs as much as the worst related measured combination. Large models
need fewer additional steps for codecs of 4 bits and more, and none from `FREE_NUMEL` parameters on.

Rows are for exchanges of the whole model that either block or are merged one outer step (H local steps) later. With F
fragments, each is merged H / F steps later; its cost is interpolated between these two. Measurements with lags of 3 and 5 of 16
steps agree. For larger models, both laws count the delay as further local steps (`LongRunLaw.as_blocking`).
"""

from commlayer.planner.convergence.curves import DENSE as DENSE
from commlayer.planner.convergence.curves import DENSE_CODEC as DENSE_CODEC
from commlayer.planner.convergence.curves import codec_class as codec_class
from commlayer.planner.convergence.curves import kind_and_point as kind_and_point
from commlayer.planner.convergence.laws import LOCAL_STEPS as LOCAL_STEPS
from commlayer.planner.convergence.laws import LOCAL_STEPS_HIGH as LOCAL_STEPS_HIGH
from commlayer.planner.convergence.laws import LONG_NUMEL as LONG_NUMEL
from commlayer.planner.convergence.laws import LONG_RUNS as LONG_RUNS
from commlayer.planner.convergence.laws import LONG_RUNS_HIGH as LONG_RUNS_HIGH
from commlayer.planner.convergence.laws import LOSS_EXPONENT as LOSS_EXPONENT
from commlayer.planner.convergence.laws import MUON as MUON
from commlayer.planner.convergence.laws import NONE as NONE
from commlayer.planner.convergence.laws import PUBLISHED_NUMEL as PUBLISHED_NUMEL
from commlayer.planner.convergence.laws import SHORT_NUMEL as SHORT_NUMEL
from commlayer.planner.convergence.laws import Excess as Excess
from commlayer.planner.convergence.laws import LocalStepLaw as LocalStepLaw
from commlayer.planner.convergence.laws import LongRunLaw as LongRunLaw
from commlayer.planner.convergence.laws import Recipe as Recipe
from commlayer.planner.convergence.laws import local_step_excess as local_step_excess
from commlayer.planner.convergence.laws import steps_alone as steps_alone
from commlayer.planner.convergence.rows import ALONE as ALONE
from commlayer.planner.convergence.rows import ALONE_AMONG as ALONE_AMONG
from commlayer.planner.convergence.rows import FAMILIES as FAMILIES
from commlayer.planner.convergence.rows import LATE_RATIO as LATE_RATIO
from commlayer.planner.convergence.rows import LIKE as LIKE
from commlayer.planner.convergence.rows import LearningRow as LearningRow
from commlayer.planner.convergence.rows import excess as excess
from commlayer.planner.convergence.rows import late_allowed as late_allowed
from commlayer.planner.convergence.rows import late_measured as late_measured
from commlayer.planner.convergence.rows import measured_local_steps as measured_local_steps
from commlayer.planner.convergence.rows import measured_noise as measured_noise
from commlayer.planner.convergence.rows import one_worker_factor as one_worker_factor
from commlayer.planner.convergence.rows import row_problem as row_problem
