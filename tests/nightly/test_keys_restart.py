"""What a coordinator knows of certificates behind a restart, and what it does not keep of those whom it has refused."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from support.coordinators import WAIT_S, Failures, quick
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)

from commlayer.cluster import authority, client, membership, messages
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.coordinator_journal import NAME, CoordinatorJournal, journaled_part
from commlayer.transport.key_folder import Keys

SECRET = "correct-horse-battery"


@pytest.mark.parametrize("when", ["while it was away", "behind the restart"])
def test_whose_certificate_is_revoked_is_cut_by_a_coordinator_that_was_restarted(when: str, folders: Folders,
                                                                                tmp_path: Path) -> None:
    """No worker registers again: the journal has the registrations."""
    gone = authority.add(folders.ca, f"gpu-{'away' if when.startswith('while') else 'behind'}")
    (tmp_path / "two").mkdir()
    first = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=2, journal=CoordinatorJournal(str(tmp_path)))
    lines = [Failures(), Failures()]

    def joined(rank: int) -> client.Membership:
        # Longer than this test.
        config = quick(token=SECRET, keys=str((folders.worker, gone)[rank]), reconnect_s=1000.0)
        return client.join(first.address, messages.worker_request("job", rank, 2, plan=b"a plan"), config, lines[rank])

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(joined, range(2)))
    first.close()
    # A process holds its journal's folder to its end.
    for path in tmp_path.glob(f"{NAME}*"):
        shutil.copy(path, tmp_path / "two")
    if when == "while it was away":
        authority.revoke(folders.ca, gone.name)
    port = int(first.address.rsplit(":", 1)[1])
    second = Coordinator(quick(token=SECRET, keys=str(folders.server), port=port, reconnect_s=1000.0),
                         journal=CoordinatorJournal(str(tmp_path / "two")))
    authority.revoke(folders.ca, gone.name)
    try:
        assert lines[0].came.wait(WAIT_S), "it sent nothing"
        assert f"worker 1: its certificate ({gone.name}) was revoked" in str(lines[0].errors[0])
    finally:
        for each in (*both, second):
            each.close()


def test_of_those_who_were_refused_nothing_is_kept(folders: Folders) -> None:
    coordinator = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=1)
    link = CoordinatorChannel(coordinator.address, SECRET, Keys(folders.worker))
    results = [messages.worker_request("job", 7, 1) for _ in range(20)]
    for one in results:
        assert "rank 7 is outside 0..0" in link.call("Join", one, messages.JoinReply, WAIT_S).error
    kept = [name for name, value in vars(coordinator).items() if any(one.token in repr(value) for one in results)]
    assert kept == []
    link.close()
    coordinator.close()


def test_a_seat_has_the_certificate_that_its_process_came_with_last() -> None:
    """A server that was killed, and resumes its registration with a new folder of keys."""
    one = msgspec.structs.replace(messages.worker_request("job", 0, 1, plan=b"a plan"), certificate="gpu-1", serial="a")
    first = membership.join(membership.State(1, 0), one, 0.0)[0]
    then = membership.join(first, msgspec.structs.replace(one, certificate="gpu-1", serial="b"), 1.0)[0]
    assert then.registrations[one.token].join.serial == "b"
    assert journaled_part(then) != journaled_part(first), "and the journal is written"
