"""Clusters and profiles as people write them: what is read, and the one line on what cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs
from support.plans import cluster, toy_job

from commlayer import plan_file, records
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner.model.cluster import NO_LIMIT
from commlayer.planner.pricing.input_checks import checked_inputs
from commlayer.planner.tables import learning, machines
from commlayer.planner.verbs.text_formats import EXAMPLE, cluster_from_line, cluster_of, nodes_of, profile_of, rate_of

NODE = '[[node]]\nname = "x"\ndevice = "rtx3060"\n'


def test_the_example_is_read() -> None:
    made = cluster_of(EXAMPLE, "cluster", toml=True)
    assert [node.name for node in made.nodes] == ["anna", "home-0", "home-1"]
    assert [node.server for node in made.nodes] == [True, False, False]
    assert made.nodes[1].link.up_bps == 20e6
    assert not made.reachable


def test_a_written_cluster_is_read_again() -> None:
    made = cluster(3, "home-100/20", reachable=False)
    assert cluster_of(records.encode(made).decode(), "cluster", toml=False) == made


def test_a_written_profile_is_read_again() -> None:
    made = machines.profile_from_tables(cluster(2, "1g"))
    assert profile_of(records.encode(made).decode(), "profile", toml=False) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NODE + 'link = { up_bps = 0, down_bps = 1e6 }', r"^c: node x: link\.up_bps is 0\b.*E-PLAN-INPUT"),
        (NODE + 'link = { up_bps = 20, down_bps = 100 }', r"^c: node x: link\.up_bps is 20\b.*E-PLAN-INPUT"),
        (NODE + 'link = { up_bps = 1e6, down_bps = 1e6, alpha_s = -1 }', r"^c: node x: link\.alpha_s is -1\.0.*E-PLAN-INPUT"),
        (NODE + 'link = "home-0/20"', "^c: node x: .*'home-0/20'.*E-LINK-NAME"),
        (NODE + 'link = "1g"\nrank = 3', r"^c: .*`rank`.*node\[0\].*E-PLAN-INPUT"),
        (NODE + 'link = "1g"\ncount = 0', r"^c: node x: count is 0\b.*E-PLAN-INPUT"),
        (NODE + 'link = "1g"\nranks = 2\nintra = "wire"', "^c: node x: intra 'wire'.*E-PLAN-INPUT"),
        (NODE.replace("rtx3060", "rtx3600") + 'link = "1g"', "^c: node x: .*'rtx3600'.* rtx30.*E-GPU-NAME"),
        (NODE + 'link = "1g"\n' + NODE + 'link = "1g"', "^c: cluster: .*'x'.*E-PLAN-INPUT"),
        (NODE + 'link = "1g"\nranks = 0', "^c: cluster: .*has ranks.*E-PLAN-INPUT"),
        ("reachable = false\n" + NODE + 'link = "1g"\nserver = false', "^c: cluster: .*server = true.*E-PLAN-INPUT"),
        ("[[node]", r"^c: .*line 1\b.*E-PLAN-INPUT"),
        ("reachable = true", "^c: .*`node`.*E-PLAN-INPUT"),
    ],
)
def test_a_wrong_cluster_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        cluster_of(text, "c", toml=True)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"floor_s":', '"flor_s":', "^p: .*`flor_s`.*E-PLAN-INPUT"),
        ('"bucket_s":', '"bucket_s":-', r"^p: profile 'tables': bucket_s is -0\.0001.*E-PLAN-INPUT"),
        ('"task_loss":null', '"task_loss":-1', r"task_loss of identity\(\) on cpu is -1\.0.*E-PLAN-INPUT"),
        ('"codec":"fp16()"', '"codec":"identity()"', r"identity\(\) on cpu .*twice.*E-PLAN-INPUT"),
    ],
)
def test_a_wrong_profile_is_one_line(before: str, after: str, message: str) -> None:
    text = records.encode(machines.profile_from_tables(cluster(2, "1g"))).decode()
    assert before in text
    with pytest.raises(ValueError, match=message) as told:
        profile_of(text.replace(before, after, 1), "p", toml=False)
    assert "\n" not in str(told.value)


def test_a_profile_with_the_guessed_losses_of_earlier_versions_is_refused_with_the_remedy(tmp_path: Path) -> None:
    profile = machines.profile_from_tables(cluster(2, "1g"))
    text = records.encode(profile).decode().replace('"task_loss":null', '"loss":0.01')
    with pytest.raises(ValueError, match=r"^p: .*`loss`.*`commlayer profile`.*E-PLAN-INPUT") as told:
        profile_of(text, "p", toml=False)
    assert "\n" not in str(told.value)
    inputs = records.encode(plan_file.PlanFileInputs(toy_job(), cluster(2, "1g"), profile)).decode()
    (tmp_path / "p.inputs.json").write_text(inputs.replace('"task_loss":null', '"loss":0.01'))
    with pytest.raises(ValueError, match=r"p\.inputs\.json.*`loss`.*`commlayer profile`.*E-PLAN-FILE"):
        plan_file.inputs_of(tmp_path / "p.json")


@pytest.mark.parametrize("field", [
    '"optimizer":"lion"', '"codes":"weights"', '"overlap":"never"', '"every":0', '"steps":0.5', '"steps_high":0', '"loss":-1',
    '"workers":-1',
])
def test_a_row_of_what_is_learnt_is_checked_alike_in_profiles_and_tables(field: str, tmp_path: Path) -> None:
    profile = machines.profile_from_tables(cluster(2, "1g"))
    name = field.partition(":")[0]
    wrong = re.sub(f"{name}:[^,}}]*", field, records.encode(learning.shipped().rows[0]).decode())
    rest = records.encode(structs.replace(profile, learning=())).decode()
    with pytest.raises(InvalidInput, match=rf"p: profile 'tables': learning: row .*{name[1:-1]} is .*E-PLAN-INPUT") as told:
        profile_of(rest.replace('"learning":[]', f'"learning":[{wrong}]'), "p", toml=False)
    table = records.encode(structs.replace(learning.shipped(), rows=())).decode()
    (tmp_path / "t.json").write_text(table.replace('"rows":[]', f'"rows":[{wrong}]'))
    with pytest.raises(RecordError, match=r"t\.json.*E-LEARNING-TABLE") as said:
        learning.read(tmp_path / "t.json")
    assert said.value.what.partition(": row ")[2] == told.value.what.partition(": row ")[2] != ""


def test_a_profile_without_codecs_is_refused() -> None:
    with pytest.raises(ValueError, match="profile 'tables' .*codecs.*E-PLAN-INPUT"):
        profile_of('{"codecs": [], "server": {"floor_s": 0}}', "p", toml=False)


@pytest.mark.parametrize(("text", "up", "down"), [("100/20Mb", 20e6, 100e6), ("1Gb", 1e9, 1e9), ("2.5Gb", 2.5e9, 2.5e9),
                                                   ("10g", 10e9, 10e9), ("home-50/5", 5e6, 50e6)])
def test_links_in_a_word(text: str, up: float, down: float) -> None:
    (node,) = nodes_of(f"cpu@{text}")
    assert (node.link.up_bps, node.link.down_bps) == (up, down)


def test_nodes_in_a_line() -> None:
    made = nodes_of("2x8*v100@25g, cpu@100Mb")
    assert [(n.name, n.ranks, n.device) for n in made] == [("v100-0", 8, "v100"), ("v100-1", 8, "v100"), ("cpu-2", 1, "cpu")]
    assert cluster_from_line("2xv100@25g").reachable
    assert not cluster_from_line("v100@25g,v100@1Gb").reachable


@pytest.mark.parametrize(("text", "message"), [
    ("", "nodes: got ''.*E-PLAN-INPUT"), ("3x", "nodes: got '3x'.*E-PLAN-INPUT"), ("rtx3060", "'rtx3060'.*E-PLAN-INPUT"),
    ("rtx3060@", "'rtx3060@'.*E-PLAN-INPUT"), ("rtx3060@fast", "'fast'.*E-LINK-NAME"), ("rtx9999@1Gb", "'rtx9999'.*E-GPU-NAME"),
    ("rtx3060@0Mb", "-0'.*E-LINK-NAME"),
])
def test_nodes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nodes_of(text)


@pytest.mark.parametrize("text", ["", "20", "20Mb/s", "100/20Mb", "-1Mb"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"rate: got '{text}'.*E-PLAN-INPUT"):
        rate_of(text)


def test_a_missing_profile_is_taken_from_the_tables() -> None:
    profile, policy, timing = checked_inputs(toy_job(), cluster(2, "1g"), None, None)
    assert profile.source == "tables"
    assert policy.max_loss == NO_LIMIT
    assert timing == toy_job().timing
