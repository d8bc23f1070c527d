"""Built-in jobs, named machines and links, and cluster descriptions in the users' notation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.plans import cluster

from commlayer import records
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner import data
from commlayer.planner.data import tables as machines
from commlayer.planner.data.models import built_in, builtin, find_preset, layers, published_job
from commlayer.planner.data.tables import gpu, link, links, node, profile_from_tables, with_job_speeds
from commlayer.planner.inputs import cluster_from_line, parse_cluster, parse_link, parse_nodes, parse_profile, parse_rate
from commlayer.planner.model import Cluster, Link
from commlayer.records import Job, Work

SIZES = {
    "resnet50": (161, 25_557_032, 4.09e9),
    "resnet101": (314, 44_549_160, 7.80e9),
    "vgg16": (32, 138_357_544, 15.47e9),
    "vit-b16": (152, 86_567_656, 17.56e9),
    "bert-base": (206, 110_106_428, None),
    "bert-large": (398, 336_226_108, None),
    "gpt2": (148, 124_439_808, None),
    "lstm": (10, 85_974_278, None),
    "gpt2-medium": (292, 354_823_168, None),
    "qwen2.5-0.5b": (290, 494_032_768, None),
    "llama3.2-1b": (146, 1_235_814_400, None),
    "llama3.2-3b": (254, 3_212_749_824, None),
    "llama3.1-8b": (291, 8_030_261_248, None),
    "llama3.1-8b-lora16": (448, 41_943_040, None),
    "whisper-small": (478, 240_582_912, None),
    "sdxl-lora16": (1120, 23_224_320, None),
}
ESPRESSO_MIB = {"vgg16": 528, "resnet101": 170, "bert-base": 420, "gpt2": 475, "lstm": 328}


@pytest.mark.parametrize("name", SIZES)
def test_shapes_add_up_to_the_published_model(name: str) -> None:
    tensors, numel, macs = SIZES[name]
    job = builtin(name)
    assert (len(job.tensors), job.numel) == (tensors, numel)
    assert len({t.name for t in job.tensors}) == tensors
    if macs:
        assert sum(layer.macs for layer in layers(name, 128)) == pytest.approx(macs, rel=0.01)
    if name in ESPRESSO_MIB:
        assert round(4 * numel / 2**20) == ESPRESSO_MIB[name]


@pytest.mark.parametrize("result", [builtin, published_job])
@pytest.mark.parametrize("name", [name for name, model in built_in().items() if model.published])
def test_times_of_presets_are_consistent(name: str, result: Callable[[str], Job]) -> None:
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


@pytest.mark.parametrize(("name", "device", "samples_per_s"), [
    ("resnet50", "v100", 1156), ("resnet50", "a100", 2470),  # NVIDIA's DeepLearningExamples, mixed precision
])
def test_presets_are_near_published_rates_in_mixed_precision(name: str, device: str, samples_per_s: float) -> None:
    timing = builtin(name, 256, device).timing
    assert timing is not None
    assert 256 / (timing.forward_s + timing.backward_s) == pytest.approx(samples_per_s, rel=0.15)


@pytest.mark.parametrize("name", [name for name, model in built_in().items() if model.preset])
def test_presets_derive_bf16_times_from_operations_and_activations_from_batches(name: str) -> None:
    one, two, preset = builtin(name, 1).timing, builtin(name, 2).timing, find_preset(name)
    assert preset is not None
    assert one is not None
    assert two is not None
    assert one.half
    assert two.backward_s == pytest.approx(2 * one.backward_s)
    assert one.backward_s == pytest.approx(one.forward_s * (1 if preset.model.frozen else 2))
    assert two.activation_nbytes == pytest.approx(2 * one.activation_nbytes)
    if (tokens := preset.model.tokens) and not preset.model.frozen:
        flops = 3 * one.forward_s * preset.utilisation * 125e12
        # Attention and a head that shares the embeddings' weight come on top of 6 operations a parameter and token.
        assert 6 * tokens * builtin(name).numel * 0.8 < flops < 6 * tokens * builtin(name).numel * 1.4


def test_preset_speed_matches_its_precision() -> None:
    nodes = parse_nodes("rtx3060@1Gb,h100@1Gb,gtx1070@1Gb")
    own = structs.replace(nodes[0], speed=0.5)
    slow, fast, plain, kept = with_job_speeds([*nodes, own], structs.replace(builtin("gpt2").timed, work=None))
    assert slow.speed == pytest.approx(25.4 / 125)
    assert fast.speed / slow.speed == pytest.approx(989 / 25.4)
    assert plain.speed == pytest.approx(6.5 / 125), "without units for halves it computes in FP32"
    assert kept.speed == 0.5, "values in a cluster file are kept"
    assert with_job_speeds(nodes, builtin("lstm").timing) == nodes


def test_step_time_is_set_by_the_limiting_resource() -> None:
    def speeds(*work: float) -> list[float]:
        nodes = parse_nodes("rtx3060@1Gb,l40s@1Gb")
        return [node.speed for node in with_job_speeds(nodes, structs.replace(builtin("gpt2").timed, work=Work(*work)))]

    products, memory = [25.4 / 125, 362 / 125], [360 / 900, 864 / 900]
    assert speeds(1.0, 0.01, 0.0) == pytest.approx(products)
    assert speeds(0.01, 1.0, 0.0) == pytest.approx(memory)
    assert speeds(0.01, 0.01, 1.0) == pytest.approx([1.0, 1.0]), "the host starts kernels"
    assert speeds(1.0, 0.5, 0.0) == pytest.approx([products[0], 2 * memory[1]]), "each device has its own limit"


@pytest.mark.parametrize(("name", "expected"), [
    ("home-100/20", Link(20e6, 100e6, 10e-3)),
    ("fiber-1000", Link(1e9, 1e9, 4e-3)),
    ("10g", Link(10e9, 10e9, 25e-6)),
    ("100m", Link(100e6, 100e6, 25e-6)),
])
def test_links(name: str, expected: Link) -> None:
    assert link(name) == expected


@pytest.mark.parametrize(("call", "message"), [
    (lambda: gpu("rtx306"), "GPU 'rtx306'.* rtx3060,.*E-GPU-NAME"),
    (lambda: gpu("abacus"), "GPU 'abacus'.* gtx1070,.*E-GPU-NAME"),
    (lambda: node("a", "v1000", "10g"), "'v1000'.* v100,.*E-GPU-NAME"),
    (lambda: link("dsl"), "link 'dsl'.*E-LINK-NAME"),
    (lambda: link("home-100/0"), "link 'home-100/0'.*E-LINK-NAME"),
    (lambda: node("a", "v100", "10g", intra="string"), f"intra 'string': .*{', '.join(links().intra)}.*E-LINK-NAME"),
    (lambda: profile_from_tables(Cluster(()), ("gzip()",)), "'gzip'.* bf16,.*E-CODEC-NAME"),
    (lambda: profile_from_tables(Cluster(()), ("topk(ratio=0)",)), r"topk: ratio is 0\b.*E-CODEC-ARGUMENT"),
])
def test_unknown_names_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


NODE = '[[node]]\nname = "x"\ndevice = "rtx3060"\n'


def test_cluster_file_round_trips() -> None:
    result = cluster(3, "home-100/20", reachable=False)
    assert parse_cluster(records.encode(result).decode(), "cluster", toml=False) == result


def test_profile_file_round_trips() -> None:
    profile = machines.profile_from_tables(cluster(2, "1g"))
    assert parse_profile(records.encode(profile).decode(), "profile", toml=False) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NODE + 'link = { up_bps = 0, down_bps = 1e6 }', r"^c: node x: link\.up_bps is 0\b.*E-PLAN-INPUT"),
        (NODE + 'link = { up_bps = 20, down_bps = 100 }', r"^c: node x: link\.up_bps is 20\b.*E-PLAN-INPUT"),
        (NODE + 'link = { up_bps = 1e6, down_bps = 1e6, alpha_s = -1 }', r"^c: node x: link\.alpha_s is -1\.0.*E-PLAN-INPUT"),
        (NODE + 'link = "home-0/20"', "^c: node x: .*'home-0/20'.*E-LINK-NAME"),
        (NODE + 'link = "1g"\nrank = 3', r"^c: .*`rank`.*node\[0\].*E-PLAN-INPUT"),
        (NODE + 'link = "1g"\ncount = 0', r"^c: node x: count is 0\b.*E-PLAN-INPUT"),
        (NODE + 'link = "1g"\nranks = 2\nintra = "wire"', "^c: node x: intra 'wire'.*E-LINK-NAME"),
        (NODE.replace("rtx3060", "rtx3600") + 'link = "1g"', "^c: node x: .*'rtx3600'.* rtx30.*E-GPU-NAME"),
        (NODE + 'link = "1g"\n' + NODE + 'link = "1g"', "^c: cluster: .*'x'.*E-PLAN-INPUT"),
        (NODE + 'link = "1g"\nranks = 0', "^c: cluster: .*has ranks.*E-PLAN-INPUT"),
        ("reachable = false\n" + NODE + 'link = "1g"\nserver = false', "^c: cluster: .*server = true.*E-PLAN-INPUT"),
        ("[[node]", r"^c: .*line 1\b.*E-PLAN-INPUT"),
        ("reachable = true", "^c: .*`node`.*E-PLAN-INPUT"),
    ],
)
def test_invalid_cluster_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_cluster(text, "c", toml=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "up", "down"), [("100/20Mb", 20e6, 100e6), ("1Gb", 1e9, 1e9), ("2.5Gb", 2.5e9, 2.5e9),
                                                  ("10g", 10e9, 10e9), ("home-50/5", 5e6, 50e6)])
def test_link_shorthand(text: str, up: float, down: float) -> None:
    (node,) = parse_nodes(f"cpu@{text}")
    assert (node.link.up_bps, node.link.down_bps) == (up, down)


def test_nodes_on_one_line() -> None:
    result = parse_nodes("2x8*v100@25g, cpu@100Mb")
    assert [(n.name, n.ranks, n.device) for n in result] == [("v100-0", 8, "v100"), ("v100-1", 8, "v100"), ("cpu-2", 1, "cpu")]
    assert cluster_from_line("2xv100@25g").reachable
    assert not cluster_from_line("v100@25g,v100@1Gb").reachable


HOME, LINE = Link(20e6, 100e6, 10e-3), Link(20e6, 20e6, 4e-3)


@pytest.mark.parametrize(("text", "count", "ranks", "device", "net"), [
    ("3xrtx3060@100/20Mb", 3, 1, "rtx3060", HOME), ("3xRTX 3060@100/20", 3, 1, "rtx3060", HOME),
    ("3 x rtx3060 @ 100/20 Mb", 3, 1, "rtx3060", HOME), ("3 \u00d7 rtx3060@100Mb/20Mb", 3, 1, "rtx3060", HOME),
    ("3X rtx-3060@100/20Mbps", 3, 1, "rtx3060", HOME), ("3 rtx3060@100/20 Mbit/s", 3, 1, "rtx3060", HOME),
    ("3*rtx3060@20Mb", 1, 3, "rtx3060", LINE), ("2 x 3 * 3060@20mbit", 2, 3, "rtx3060", LINE),
    ("NVIDIA GeForce RTX 3060 Ti@20000 kb/s", 1, 1, "rtx3060ti", LINE), ("cpu@0.02Gb", 1, 1, "cpu", LINE),
    ("l40s@1Gb/50Mb", 1, 1, "l40s", Link(50e6, 1e9, 10e-3)), ("4090@10g", 1, 1, "rtx4090", Link(1e10, 1e10, 25e-6)),
])
def test_machine_lines_are_parsed_in_every_spelling(text: str, count: int, ranks: int, device: str, net: Link) -> None:
    nodes = parse_nodes(text)
    assert [node.name for node in nodes] == [f"{device}-{i}" for i in range(count)]
    assert {(node.ranks, node.device, node.link) for node in nodes} == {(ranks, device, net)}


@pytest.mark.parametrize(("text", "code", "values"), [
    ("@20Mb", "E-PLAN-INPUT", ["'@20Mb'", "3xrtx3060@100/20Mb"]), ("3xRTX 3060", "E-PLAN-INPUT", ["3xrtx3060@100/20Mb"]),
    ("0xrtx3060@1Gb", "E-PLAN-INPUT", ["1024"]), ("2xrtx3060@1Gb,1023xcpu@1Gb", "E-PLAN-INPUT", ["1024"]),
    ("rtx3600@1Gb", "E-GPU-NAME", ["similar names: rtx3060,"]), ("rtx5400@1Gb", "E-GPU-NAME", ["similar names: "]),
    ("rtx3060@12.5MB", "E-LINK-NAME", ['"100Mb"', '"12.5Mb"']), ("rtx3060@100/20MB/s", "E-LINK-NAME", ['"800/160Mb"']),
    ("rtx3060@1 Gbyte/s", "E-LINK-NAME", ['"8Gb"']), ("rtx3060@100", "E-LINK-NAME", ["'100'", "100/20Mb"]),
    ("rtx3060@1Gb/20", "E-LINK-NAME", ["unit"]), ("rtx3060@1G", "E-LINK-NAME", ["'1G'", '"10g"']),
    ("rtx3060@0/20Mb", "E-LINK-NAME", ["above 0"]),
])
def test_malformed_machine_line_names_the_right_form(text: str, code: str, values: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_nodes(text, what="homes")
    assert caught.value.code == code
    assert [value for value in values if value not in str(caught.value)] == []


PIECES = st.sampled_from([*"0123456789x*@/,. -MmGgkKbB\u212a\u0663\u00b2", "rtx3060", "Mb", "GB/s", "100/20Mb", "9" * 400])


@given(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=12).map("".join)))
def test_any_line_is_parsed_or_refused_in_one_line(text: str) -> None:
    answers = []
    for read in (cluster_from_line, parse_rate, lambda line: parse_link(line, "server")):
        try:
            read(text)
        except InvalidInput as error:
            answers.append(str(error))
    assert [answer for answer in answers if "\n" in answer] == []


@pytest.mark.parametrize("text", ["", "20", "100/20Mb", "-1Mb"])
def test_invalid_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"rate: got '{text}'.*E-PLAN-INPUT"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "problem"), [
    ("gpus = {}\ncpu = {speed = 0, tflops = 1, stream_bytes_s = 1}", r"speed|`float` > 0"),
    ("gpus = {}\ncpu = {speed = 1, tflops = 1, stream_bytes_s = 1, watts = 9}", "watts"),
    ("gpus = {", "at end of document"),
])
def test_a_damaged_table_of_the_package_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str,
) -> None:
    (tmp_path / "broken.toml").write_text(text)
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    with pytest.raises(RecordError, match=f"{tmp_path}/broken.toml: .*({problem}).*install.*E-PLAN-DATA"):
        data.load("broken", machines.Machines)
