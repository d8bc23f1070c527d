"""Settings: which source wins, and one line for each mistake that names field, source, value and allowed values."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.config import (
    Config,
    Launch,
    broken_after_s,
    child_environment,
    codec_threads,
    host_port,
    is_loopback,
    join_host,
    read_config,
    read_launch,
    reconnect_window_s,
)
from commlayer.errors import RecordError
from commlayer.records import MAX_BUCKET_NBYTES

NOWHERE = "/nonexistent"


def read(argument: Any = None, environ: dict[str, str] | None = None, cwd: str | Path = NOWHERE) -> Config:
    return read_config(argument, environ=environ or {}, cwd=cwd)


def test_defaults() -> None:
    assert read() == Config()


SOURCES = ("argument", "environment", "file")


@pytest.mark.parametrize("sources", [s for n in (1, 2, 3) for s in itertools.combinations(SOURCES, n)])
def test_first_source_that_sets_a_field_wins(sources: tuple[str, ...], tmp_path: Path) -> None:
    values = {"argument": 11.0, "environment": 12.0, "file": 13.0}
    if "file" in sources:
        (tmp_path / "commlayer.toml").write_text("deadline_s = 13\nnode = 3\n")
    environ = {"COMMLAYER_DEADLINE_S": "12"} if "environment" in sources else {}
    config = read({"deadline_s": 11} if "argument" in sources else None, environ, tmp_path)
    assert config.deadline_s == values[sources[0]]
    assert config.node == (3 if "file" in sources else -1), "a field is taken from the source that has it"


def test_config_argument_replaces_all_sources_and_is_validated() -> None:
    assert read(Config(node=2), {"COMMLAYER_NODE": "5", "COMMLAYER_DEADLINE_S": "5"}) == Config(node=2)
    with pytest.raises(RecordError, match="node: got -2 from argument node.*E-SETTING"):
        read(Config(node=-2))


def test_named_config_file_must_exist(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('servers = "each"\n')
    assert read(None, {"COMMLAYER_CONFIG": "other.toml"}, tmp_path).servers == "each"
    with pytest.raises(RecordError, match=r"^COMMLAYER_CONFIG: .*missing\.toml .*No such file.*E-SETTING"):
        read(None, {"COMMLAYER_CONFIG": "missing.toml"}, tmp_path)


MISTAKES = [
    ({"port": 70000}, {}, "", "port: got 70000 from argument port"),
    ({"port": "7000"}, {}, "", "port: got '7000' from argument port"),
    ({"deadline_s": 0}, {}, "", "deadline_s: got 0 from argument deadline_s"),
    ({"deadline_s": float("nan")}, {}, "", "deadline_s: got nan"),
    ({"insecure": 1}, {}, "", "insecure: got 1 from argument insecure"),
    ({"servers": "two"}, {}, "", "servers: got 'two' from argument servers"),
    (None, {"COMMLAYER_PORT": "http"}, "", "port: got 'http' from environment variable COMMLAYER_PORT"),
    (None, {"COMMLAYER_DEADLNE_S": "3"}, "", "(environment variable COMMLAYER_DEADLNE_S); did you mean deadline_s?"),
    ({"heartbeats": 1}, {}, "", "(argument heartbeats); did you mean heartbeat_s?"),
    ({"zzz": 1}, {}, "", "(argument zzz); allowed: join, bind"),
    (None, {}, "node = 1.5", "commlayer.toml:node, "),
    (None, {}, "nod = 1", "commlayer.toml:nod); did you mean node?"),
    (None, {}, "node = ", "commlayer.toml is not TOML"),
    ({"dead_after_s": 1.5}, {"COMMLAYER_HEARTBEAT_S": "1"}, "",
     "dead_after_s: got 1.5 from argument dead_after_s, but it must be at least twice heartbeat_s, which is 1 from"),
    ({"cut_nbytes": MAX_BUCKET_NBYTES + 1}, {}, "", f"from 4096 to {MAX_BUCKET_NBYTES}"),
    (None, {"COMMLAYER_THREADS": "2"}, "", "threads: "),
    ({"join": "somewhere"}, {}, "", "join: got 'somewhere'"),
]


@pytest.mark.parametrize(("argument", "environ", "toml", "line"), MISTAKES)
def test_invalid_setting_is_one_line(argument: Any, environ: dict[str, str], toml: str, line: str, tmp_path: Path) -> None:
    if toml:
        (tmp_path / "commlayer.toml").write_text(toml)
    with pytest.raises(RecordError) as caught:
        read(argument, environ, tmp_path)
    assert line in str(caught.value)
    assert caught.value.code == ("E-ADDRESS" if "somewhere" in line else "E-SETTING")
    assert "\n" not in str(caught.value)


PLAIN_TEXT = [
    ({}, ""),
    ({"bind": "127.0.0.2", "advertise": "localhost", "join": "[::1]:7000"}, ""),
    ({"bind": "10.0.0.1"}, "bind: 10.0.0.1 .*E-PLAIN-TEXT"),
    ({"advertise": "gpu-box"}, "advertise: gpu-box .*E-PLAIN-TEXT"),
    ({"advertise": "gpu-box:7000"}, "advertise: gpu-box .*E-PLAIN-TEXT"),
    ({"advertise": "127.0.0.1:9000"}, "advertise: 127.0.0.1 .*E-PLAIN-TEXT"),
    ({"advertise": "127.0.0.1:9000", "insecure": True}, ""),
    ({"advertise": "127.0.0.1:x"}, "advertise: got '127.0.0.1:x'.*E-ADDRESS"),
    ({"join": "gpu-box:7000"}, "join: gpu-box .*E-PLAIN-TEXT"),
    ({"bind": "10.0.0.1", "insecure": True}, ""),
    ({"join": "gpu-box:7000", "insecure": True}, ""),
    ({"bind": "0.0.0.0"}, "bind: 0.0.0.0 .*E-PLAIN-TEXT"),
    ({"bind": "0.0.0.0", "insecure": True}, "bind: 0.0.0.0 .*E-SETTING"),
    ({"bind": "::", "insecure": True, "advertise": "0.0.0.0"}, "advertise: 0.0.0.0 .*E-SETTING"),
    ({"bind": "0.0.0.0", "advertise": "192.168.1.7", "insecure": True}, ""),
    ({"bind": "10.0.0.1"}, "COMMLAYER_KEYS.* `commlayer keys init` .*insecure=True.*E-PLAIN-TEXT"),
    ({"bind": "10.0.0.1", "join": "gpu-box:7000", "keys": "/there"}, "keys: /there/token from argument keys .*E-SETTING"),
    ({"bind": "10.0.0.1", "join": "gpu-box:7000", "keys": "/there", "token": "long-enough"}, ""),
]


@pytest.mark.parametrize(("fields", "problem"), PLAIN_TEXT)
def test_plain_text_beyond_loopback_needs_permission(fields: dict[str, Any], problem: str) -> None:
    if problem:
        with pytest.raises(RecordError, match=problem):
            read(fields)
    else:
        read(fields)


def test_kubernetes_service_links_are_not_settings() -> None:
    links = {"COMMLAYER_SERVICE_HOST": "10.1.2.3", "COMMLAYER_SERVICE_PORT": "7000", "COMMLAYER_PORT": "tcp://10.1.2.3:7000",
             "COMMLAYER_PORT_7000_TCP": "tcp://10.1.2.3:7000"}
    assert read(None, links | {"COMMLAYER_NODE": "2"}) == Config(node=2)


CONFIGS = st.builds(
    Config, join=st.sampled_from(["", "127.0.0.1:7000"]), port=st.integers(0, 65535), insecure=st.booleans(),
    servers=st.sampled_from(["one", "each"]), deadline_s=st.floats(1e-3, 86400), dead_after_s=st.floats(2.0, 86400),
    fuse_nbytes=st.integers(0, MAX_BUCKET_NBYTES), backend=st.sampled_from(["auto", "native", "fallback"]),
    events=st.text(st.characters(codec="ascii", exclude_categories=["Cc"])),
)


@given(CONFIGS)
def test_child_process_inherits_all_settings(config: Config) -> None:
    assert read(None, child_environment(config)) == config


def test_ranks_of_a_node_share_its_cores_by_default() -> None:
    alone = codec_threads(Config(), Launch())
    assert 1 <= alone <= 4
    assert codec_threads(Config(), Launch(local_world=1000, world=1000)) == 1
    assert codec_threads(Config(codec_threads=7), Launch(local_world=1000, world=1000)) == 7


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
            "MASTER_ADDR": "node0"}


def test_launch_settings_come_from_torchrun() -> None:
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, 4, 1, agent=1)
    assert read_launch({}) == Launch()
    assert read_launch({"RANK": "3", "WORLD_SIZE": "4"}) == Launch(rank=3, world=4, node=3), "one process per node by default"


@pytest.mark.parametrize(("change", "line"), [
    ({"RANK": ""}, "^WORLD_SIZE "),
    ({"WORLD_SIZE": ""}, "^RANK "),
    ({"RANK": "8"}, "^RANK: got 8 "),
    ({"RANK": "-1"}, "^RANK: got '-1' "),
    ({"LOCAL_RANK": "4"}, "^LOCAL_RANK: got 4 "),
])
def test_contradictory_launch_settings_are_named(change: dict[str, str], line: str) -> None:
    with pytest.raises(RecordError, match=f"{line}.*E-LAUNCH-ENVIRONMENT"):
        read_launch(TORCHRUN | change)


@given(st.sampled_from(["10.0.0.1", "::1", "fe80::1", "gpu-box.lan", "localhost"]), st.integers(1, 65535))
def test_addresses_round_trip(host: str, port: int) -> None:
    assert host_port(join_host(host, port)) == (host, port)


@pytest.mark.parametrize("address", ["", "host", ":7000", "host:", "host:0", "host:65536", "host:x", "::1:7000", "[]:7"])
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(repr(address))}.*E-ADDRESS"):
        host_port(address)


def test_only_loopback_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "localhost.example.org", "")))


@pytest.mark.parametrize(("fields", "window_s", "silent_s"), [
    ({}, 60.0, 15.0), ({"deadline_s": 8.0}, 8.0, 5.0), ({"deadline_s": 3.0}, 3.0, 3.0), ({"reconnect_s": 0.0}, 0.0, 600.0),
    ({"reconnect_s": 900.0}, 600.0, 150.0)])
def test_reconnect_time_is_within_the_deadline(
        fields: dict[str, float], window_s: float, silent_s: float) -> None:
    config = read_config(fields, environ={}, cwd="/nonexistent")
    assert (reconnect_window_s(config), broken_after_s(config)) == (window_s, silent_s)
