"""Gradient codecs, which compress a bucket to payload bytes and decompress it, optionally with error feedback and momentum."""

from commlayer.compressors.blockwise import int4 as int4
from commlayer.compressors.blockwise import int8 as int8
from commlayer.compressors.blockwise import onebit as onebit
from commlayer.compressors.blockwise import qsgd as qsgd
from commlayer.compressors.codec import Codec as Codec
from commlayer.compressors.codec import Reduction as Reduction
from commlayer.compressors.codec import place as place
from commlayer.compressors.dense import bf16 as bf16
from commlayer.compressors.dense import fp16 as fp16
from commlayer.compressors.dense import identity as identity
from commlayer.compressors.feedback import error_feedback as error_feedback
from commlayer.compressors.feedback import momentum as momentum
from commlayer.compressors.feedback import wrap as wrap
from commlayer.compressors.plan_codecs import build as build
from commlayer.compressors.plan_codecs import codec_of as codec_of
from commlayer.compressors.plan_codecs import parse as parse
from commlayer.compressors.plan_codecs import runs_on as runs_on
from commlayer.compressors.plan_codecs import two_way as two_way
from commlayer.compressors.powersgd import powersgd as powersgd
from commlayer.compressors.randomk import randomk as randomk
from commlayer.compressors.state import restore as restore
from commlayer.compressors.state import seed as seed
from commlayer.compressors.state import shared_snapshot as shared_snapshot
from commlayer.compressors.state import snapshot as snapshot
from commlayer.compressors.topk import block_threshold as block_threshold
from commlayer.compressors.topk import topk as topk
