"""Types of settings: allowed values and their description for errors."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from commlayer.records import MAX_BUCKET_NBYTES

DAY_S = 86400.0
MOST_LOSS = 1.0
"""Upper limit of a loss budget, relative to dense training's loss."""

# `description` is the allowed values: error messages and `describe` quote it.
Text = Annotated[str, msgspec.Meta(description="text")]
Secret = Annotated[str, msgspec.Meta(pattern=r"^([!-~]{8,})?$", description="8 or more visible characters, without blanks")]
Flag = Annotated[bool, msgspec.Meta(description="true or false")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=DAY_S, description="a number of seconds above 0, at most 86400")]
Window = Annotated[float, msgspec.Meta(ge=0, le=DAY_S, description="a number of seconds from 0 (not at all) to 86400")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 16, description="a whole number from 0 to 65536")]
Node = Annotated[int, msgspec.Meta(ge=-1, le=1 << 16, description="a whole number from 0 to 65536, -1: by host name")]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e12, description="a number above 0")]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_BUCKET_NBYTES, description=f"a number of bytes from 0 to {MAX_BUCKET_NBYTES}")]
Servers = Annotated[Literal["one", "each"], msgspec.Meta(description='"one" (on rank 0\'s node) or "each" (one on every node)')]
Carrier = Annotated[Literal["auto", "tcp", "grpc"], msgspec.Meta(description='"auto", "tcp" or "grpc"')]
Backend = Annotated[Literal["auto", "native", "reference"], msgspec.Meta(description='"auto", "native" or "reference"')]
RatioOver = Annotated[Literal["bucket", "plan"], msgspec.Meta(description='"bucket" or "plan"')]
CutBytes = Annotated[int, msgspec.Meta(ge=4096, le=MAX_BUCKET_NBYTES,
                                       description=f"a number of bytes from 4096 to {MAX_BUCKET_NBYTES}")]
Threads = Annotated[int, msgspec.Meta(ge=0, le=16, description="a whole number from 0 to 16")]
Budget = Annotated[float, msgspec.Meta(ge=0, le=MOST_LOSS,
                                       description="a part of the loss from 0 (none named) to 1, 0.005 for 0.5 %")]
DriftMode = Annotated[Literal["resync", "end", "warn"], msgspec.Meta(description='"resync", "end" or "warn"')]
Spacing = Annotated[int, msgspec.Meta(ge=-1, le=1 << 16, description="a whole number from 0 (never) to 65536, -1: as often as "
                                      "costs 0.1 % of the time")]
GuardMode = Annotated[Literal["auto", "off", "warn", "act"], msgspec.Meta(description='"auto", "off", "warn" or "act"')]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535, description="a port number from 0 to 65535, 0 for any free one")]
