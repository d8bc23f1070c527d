"""The process under fuzzing: a coordinator, and a summation server with its sockets.

It prints their addresses and runs until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from commlayer import planner
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.servers import server_codecs
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import SumServer
from commlayer.config import join_host, read_config
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE
from tests.chaos.fuzz_targets import JOB, SECRET

HONEST = 2
"""Number of members whose sums must continue. Other ranks are accepted as well and may send anything."""
PLAN = planner.default_plan(JOB, codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=1024,
                            cut_nbytes=4096)


def main() -> None:
    coordinator = Coordinator(read_config({"token": SECRET}), workers=HONEST + 1, servers=1)
    core = Summation(0, 1, dict(server_codecs.make_codec_ops(PLAN, 0)),
                     server_codecs.contributing_ranks(PLAN, node_ranks(HONEST, 1)))
    transport = StreamTransport(Hello("job", SERVER_BASE), lambda _: "", Settings(secret=SECRET, resume=True))
    addresses: dict[str, Any] = {"control": coordinator.address, "data": join_host(*transport.listen())}
    server = SumServer(core, transport, range(SERVER_BASE), stall_s=60.0, recycle=transport.pool.give)
    print(json.dumps(addresses), flush=True)
    sys.stdin.read()
    server.close()
    coordinator.close()


if __name__ == "__main__":
    main()
