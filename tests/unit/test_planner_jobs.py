"""Built-in jobs against published sizes, and times that hang together."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs
from support.plans import cluster, toy_job

from commlayer import plan_file, records
from commlayer.compressors.plan_codecs import parse
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner import tables as learning
from commlayer.planner import tables as machines
from commlayer.planner.costs import Prices
from commlayer.planner.inputs import EXAMPLE, checked_inputs, cluster_from_line, cluster_of, nodes_of, profile_of, rate_of
from commlayer.planner.model import NO_LIMIT, Cluster, Link
from commlayer.planner.tables import (
    DEFAULT_CODECS,
    GPUS,
    INTRA,
    MODELS,
    PRESETS,
    PUBLISHED,
    at_precision,
    builtin,
    gpu,
    layers,
    link,
    node,
    profile_from_tables,
    published,
    speed,
)
from commlayer.records import Job, Spec

SIZES = {
    "resnet50": (161, 25_557_032, 4.09e9),
    "resnet101": (314, 44_549_160, 7.80e9),
    "vgg16": (32, 138_357_544, 15.47e9),
    "vit-b16": (152, 86_567_656, 17.56e9),
    "bert-base": (206, 110_106_428, None),
    "bert-large": (398, 336_226_108, None),
    "gpt2": (148, 124_439_808, None),
    "lstm": (10, 85_974_278, None),
}
ESPRESSO_MIB = {"vgg16": 528, "resnet101": 170, "bert-base": 420, "gpt2": 475, "lstm": 328}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_add_up_to_the_published_model(name: str) -> None:
    tensors, numel, macs = SIZES[name]
    job = builtin(name)
    assert (len(job.tensors), job.numel) == (tensors, numel)
    assert len({t.name for t in job.tensors}) == tensors
    if macs:
        assert sum(layer.macs for layer in layers(name, 128)) == pytest.approx(macs, rel=0.01)
    if name in ESPRESSO_MIB:
        assert round(4 * numel / 2**20) == ESPRESSO_MIB[name]


@pytest.mark.parametrize(("name", "heads", "numel"), [
    ("bert-base", "cls.", 109_482_240), ("bert-large", "cls.", 335_141_888), ("vit-b16", "heads.", 85_798_656),
])
def test_models_without_their_heads(name: str, heads: str, numel: int) -> None:
    assert sum(t.numel for t in builtin(name).tensors if not t.name.startswith(heads)) == numel


@pytest.mark.parametrize("result", [builtin, published])
@pytest.mark.parametrize("name", PUBLISHED)
def test_times_hang_together(name: str, result: Callable[[str], Job]) -> None:
    job = result(name)
    assert job.timing is not None
    ready, needed = job.timing.ready_s, job.timing.needed_s
    assert len(ready) == len(needed) == len(job.tensors)
    assert list(ready) == sorted(ready, reverse=True), "the last layer's gradient is ready first"
    assert list(needed) == sorted(needed)
    assert ready[0] == pytest.approx(job.timing.backward_s)
    assert needed[0] == 0
    assert min(ready) >= 0
    assert max(needed) <= job.timing.forward_s * (1 + 1e-12)
    assert 0 < job.timing.update_s < job.timing.backward_s


def test_published_times_and_scaling() -> None:
    vgg = published("vgg16").timing
    twice, slower = published("vgg16", 64).timing, published("vgg16", device="rtx3060").timing
    assert vgg is not None
    assert twice is not None
    assert slower is not None
    assert vgg.backward_s == pytest.approx(85.3e-3)
    assert twice.backward_s == pytest.approx(2 * vgg.backward_s)
    assert twice.update_s == vgg.update_s
    assert slower.backward_s == pytest.approx(vgg.backward_s / speed("rtx3060"))
    resnet = published("resnet50").timing
    assert resnet is not None
    assert 32 / (resnet.backward_s + resnet.forward_s) == pytest.approx(356, rel=0.01)


@pytest.mark.parametrize(("name", "device", "samples_per_s"), [
    ("resnet50", "v100", 1156), ("resnet50", "a100", 2470),  # NVIDIA's DeepLearningExamples, mixed precision
])
def test_presets_are_near_published_rates_in_mixed_precision(name: str, device: str, samples_per_s: float) -> None:
    timing = builtin(name, 256, device).timing
    assert timing is not None
    assert 256 / (timing.forward_s + timing.backward_s) == pytest.approx(samples_per_s, rel=0.15)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_computed_in_bf16_from_operations_and_keep_activations_by_the_batch(name: str) -> None:
    one, two = builtin(name, 1).timing, builtin(name, 2).timing
    assert one is not None
    assert two is not None
    assert one.half
    assert two.backward_s == pytest.approx(2 * one.backward_s)
    assert two.activation_nbytes == pytest.approx(2 * one.activation_nbytes)
    if tokens := PRESETS[name].tokens:
        assert PRESETS[name].batch * tokens == 8 * 1024
        flops = 3 * one.forward_s * PRESETS[name].utilisation * 125e12
        # Attention and a head that shares the embeddings' weight come on top of 6 operations a parameter and token.
        assert 6 * tokens * builtin(name).numel * 0.8 < flops < 6 * tokens * builtin(name).numel * 1.4


def test_speeds_of_a_preset_are_those_of_its_precision() -> None:
    nodes = nodes_of("rtx3060@1Gb,h100@1Gb,gtx1070@1Gb")
    own = structs.replace(nodes[0], speed=0.5)
    slow, fast, plain, kept = at_precision([*nodes, own], half=True)
    assert slow.speed == pytest.approx(25.4 / 125)
    assert fast.speed / slow.speed == pytest.approx(989 / 25.4)
    assert plain.speed == pytest.approx(6.5 / 125), "without units for halves it computes in FP32"
    assert kept.speed == 0.5, "what a cluster file says stands"
    assert at_precision(nodes, half=False) == nodes


@pytest.mark.parametrize(("name", "batch", "message"), [
    ("resnet5", None, "'resnet5'.* resnet50,.*E-MODEL-NAME"),
    ("zzz", None, "'zzz'.* resnet50, .* lstm.*E-MODEL-NAME"),
    ("lstm", 0, r"batch of lstm: got 0\b.*E-ARGUMENT"),
])
def test_unknown_jobs(name: str, batch: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builtin(name, batch)


def test_jobs_are_made_alike_each_time() -> None:
    assert builtin("gpt2") == builtin("gpt2") != published("gpt2")


# ---- Named machines and links: what the tables say, what profiles are made of them, what is refused

@pytest.mark.parametrize(("name", "expected"), [
    ("home-100/20", Link(20e6, 100e6, 10e-3)),
    ("fiber-1000", Link(1e9, 1e9, 4e-3)),
    ("10g", Link(10e9, 10e9, 25e-6)),
    ("100m", Link(100e6, 100e6, 25e-6)),
])
def test_links(name: str, expected: Link) -> None:
    assert link(name) == expected


def test_speeds_are_against_a_v100() -> None:
    assert speed("v100") == 1
    assert speed("cpu") < min(g.speed for g in GPUS.values())
    assert speed("rtx2060") < speed("rtx3060") < speed("rtx3090") < speed("rtx4090") < speed("h100")
    assert speed("RTX3060") == speed("rtx3060")


def test_a_profile_prices_every_codec_on_every_device() -> None:
    cluster = Cluster((node("a", "rtx3060", "home-100/20"), node("b", "h100", "25g", ranks=4, intra="nvlink-h100"),
                       node("c", "cpu", "fiber-1000")))
    prices = Prices(cluster, profile_from_tables(cluster))
    for codec in DEFAULT_CODECS:
        a, b = (prices.cost(codec, "gpu", n) for n in cluster.nodes[:2])
        assert (a.device, b.device) == ("rtx3060", "h100")
        assert a.encode(10**8) >= b.encode(10**8)
        assert prices.cost(codec, "cpu", cluster.nodes[0]).decode(10**7) > a.decode(10**7)


def test_sizes_are_those_of_the_codecs() -> None:
    """What a codec really sends stays near the table."""
    profile = profile_from_tables(Cluster((node("a", "cpu", "10g"),)))
    numel = 1 << 20
    for cost in profile.codecs:
        bound = parse(cost.codec).bound(Spec((numel,)))
        assert 0.5 * bound <= cost.nbytes(numel) <= 1.1 * bound, cost.codec


@pytest.mark.parametrize(("call", "message"), [
    (lambda: gpu("rtx306"), "GPU 'rtx306'.* rtx3060,.*E-GPU-NAME"),
    (lambda: gpu("abacus"), "GPU 'abacus'.* gtx1070,.*E-GPU-NAME"),
    (lambda: node("a", "v1000", "10g"), "'v1000'.* v100,.*E-GPU-NAME"),
    (lambda: link("dsl"), "link 'dsl'.*E-LINK-NAME"),
    (lambda: link("home-100/0"), "link 'home-100/0'.*E-LINK-NAME"),
    (lambda: node("a", "v100", "10g", intra="string"), f"intra 'string': .*{', '.join(INTRA)}.*E-LINK-NAME"),
    (lambda: profile_from_tables(Cluster(()), ("gzip()",)), "'gzip'.* bf16,.*E-CODEC-NAME"),
    (lambda: profile_from_tables(Cluster(()), ("topk(ratio=0)",)), r"topk: ratio is 0\b.*E-CODEC-ARGUMENT"),
])
def test_unknown_names(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---- Clusters and profiles as people write them: what is read, and the one line on what cannot be

NODE = '[[node]]\nname = "x"\ndevice = "rtx3060"\n'


def test_the_example_is_read() -> None:
    result = cluster_of(EXAMPLE, "cluster", toml=True)
    assert [node.name for node in result.nodes] == ["anna", "home-0", "home-1"]
    assert [node.server for node in result.nodes] == [True, False, False]
    assert result.nodes[1].link.up_bps == 20e6
    assert not result.reachable


def test_a_written_cluster_is_read_again() -> None:
    result = cluster(3, "home-100/20", reachable=False)
    assert cluster_of(records.encode(result).decode(), "cluster", toml=False) == result


def test_a_written_profile_is_read_again() -> None:
    profile = machines.profile_from_tables(cluster(2, "1g"))
    assert profile_of(records.encode(profile).decode(), "profile", toml=False) == profile


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
    with pytest.raises(ValueError, match=message) as caught:
        cluster_of(text, "c", toml=True)
    assert "\n" not in str(caught.value)


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
    with pytest.raises(ValueError, match=message) as caught:
        profile_of(text.replace(before, after, 1), "p", toml=False)
    assert "\n" not in str(caught.value)


def test_a_profile_with_the_guessed_losses_of_earlier_versions_is_refused_with_the_remedy(tmp_path: Path) -> None:
    profile = machines.profile_from_tables(cluster(2, "1g"))
    text = records.encode(profile).decode().replace('"task_loss":null', '"loss":0.01')
    with pytest.raises(ValueError, match=r"^p: .*`loss`.*`commlayer profile`.*E-PLAN-INPUT") as caught:
        profile_of(text, "p", toml=False)
    assert "\n" not in str(caught.value)
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
    with pytest.raises(InvalidInput, match=rf"p: profile 'tables': learning: row .*{name[1:-1]} is .*E-PLAN-INPUT") as caught:
        profile_of(rest.replace('"learning":[]', f'"learning":[{wrong}]'), "p", toml=False)
    table = records.encode(structs.replace(learning.shipped(), rows=())).decode()
    (tmp_path / "t.json").write_text(table.replace('"rows":[]', f'"rows":[{wrong}]'))
    with pytest.raises(RecordError, match=r"t\.json.*E-LEARNING-TABLE") as error:
        learning.read(tmp_path / "t.json")
    assert error.value.what.partition(": row ")[2] == caught.value.what.partition(": row ")[2] != ""


def test_a_profile_without_codecs_is_refused() -> None:
    with pytest.raises(ValueError, match="profile 'tables' .*codecs.*E-PLAN-INPUT"):
        profile_of('{"codecs": [], "server": {"floor_s": 0}}', "p", toml=False)


@pytest.mark.parametrize(("text", "up", "down"), [("100/20Mb", 20e6, 100e6), ("1Gb", 1e9, 1e9), ("2.5Gb", 2.5e9, 2.5e9),
                                                   ("10g", 10e9, 10e9), ("home-50/5", 5e6, 50e6)])
def test_links_in_a_word(text: str, up: float, down: float) -> None:
    (node,) = nodes_of(f"cpu@{text}")
    assert (node.link.up_bps, node.link.down_bps) == (up, down)


def test_nodes_in_a_line() -> None:
    result = nodes_of("2x8*v100@25g, cpu@100Mb")
    assert [(n.name, n.ranks, n.device) for n in result] == [("v100-0", 8, "v100"), ("v100-1", 8, "v100"), ("cpu-2", 1, "cpu")]
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
