"""What commlayer works with: each line names the tests that show it. docs/generate.py makes docs/reference/support.md of it.

tests/multi/test_features.py runs each feature in each kind of job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

AS_OF = "November 2026"


class Row(NamedTuple):
    """`tests`: functions of tests, each as "file::function", all of which exist (tests/unit/test_docs.py)."""

    subject: str
    verdict: str
    how: str
    tests: tuple[str, ...] = ()


def attach(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/multi/test_attach.py::{name}" for name in names)


def recipes(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/nightly/test_recipes_frameworks.py::{name}" for name in names)


def engines(name: str) -> Callable[..., tuple[str, ...]]:
    return lambda *tests: tuple(f"tests/nightly/test_engines_{name}.py::{test}" for test in tests)


ray, slurm, kubernetes, sky = map(engines, ("ray", "slurm", "kubernetes", "skypilot"))
KINDS = {
    "collectives": "torchrun, without servers",
    "servers": "torchrun, with servers",
    "stay": "homes that stay",
    "leave": "homes that come and go",
    "gpus": "several GPUs in a home",
    "gpus_leave": "several GPUs, homes that come and go",
}
"""The first uses collectives, the second a server on each machine, the others `commlayer serve` and `commlayer join`."""


class Feature(NamedTuple):
    """`tests`: files with further tests."""

    title: str
    tests: tuple[str, ...]


LEAVES = "tests/nightly/test_site_failures.py"
FRAMEWORKS = ("tests/nightly/test_recipes_frameworks.py",)
FEATURES = {
    "step": Feature('`sync="step"`', ("tests/multi/test_attach.py", LEAVES, "tests/nightly/test_site_joins.py")),
    "forward": Feature('`sync="forward"`', ("tests/multi/test_forward_overlap.py",)),
    "local": Feature("local steps, whole model", ("tests/multi/test_local_steps.py", LEAVES)),
    "fragments": Feature("local steps in fragments", ("tests/multi/test_local_steps.py",)),
    "late": Feature("averages one step late", ("tests/multi/test_late_results.py",)),
    "auto": Feature('`sync="auto"`', ("tests/nightly/test_session_auto_links.py",)),
    "gpus": Feature("sums inside a machine", ("tests/multi/test_paths.py", "tests/nightly/test_site_commands.py",
                                              "tests/nightly/test_site_gpus.py")),
    "join": Feature("`session.join()`", ("tests/multi/test_uneven_inputs.py",)),
    "join_local": Feature("`session.join()`, local steps", ("tests/multi/test_uneven_inputs.py",)),
    "shares": Feature("`LoadBalancer`", ("tests/nightly/test_shares_live.py",)),
    "weight": Feature("`session.weight(n)`", ("tests/multi/test_exact_averages.py", "tests/nightly/test_law_sessions.py")),
    "resume": Feature("checkpoint of another number of workers",
                      ("tests/multi/test_checkpoint.py", "tests/nightly/test_site_resumes.py")),
    "guard": Feature("quality guard", ("tests/nightly/test_guard_live.py",)),
    "switch": Feature("`session.switch()`", ("tests/multi/test_switch.py", LEAVES)),
    "trainer": Feature("transformers' Trainer", FRAMEWORKS),
    "accelerate": Feature("Accelerate", FRAMEWORKS),
    "lightning": Feature("Lightning", FRAMEWORKS),
    "trl": Feature("TRL's SFTTrainer", FRAMEWORKS),
}


class Refusal(NamedTuple):
    """The code of the error, and the reason."""

    code: str
    why: str


REFUSED = {
    ("late", "collectives"): Refusal("E-PLAN-REFUSED", "only servers keep a result until the next step"),
}
"""Where a feature is refused today. A feature without an entry must work: remove the entry, and the test requires it."""

YES, LIMITS, NO, NEVER = "works", "works, with limits", "refused", "never run"
SAME = ("test_equals_ddp", "test_resumed_run_equals_the_uninterrupted_run", "test_local_steps_resume")

TABLES: dict[str, tuple[Row, ...]] = {
    "Training scripts": (
        Row("plain loop, DistributedDataParallel", YES,
            "two ranks train as one process does on both batches",
            attach("test_training_equals_a_single_process_on_the_union")),
        Row("DDP communication hook", YES,
            "the same, through `comm_hook`",
            attach("test_training_equals_a_single_process_without_ddp_by_hook_and_inside_a_node")),
        Row("torch.compile", YES,
            "model compiled before or after DDP, or the whole step; back end aot_eager. Compiled autograd is refused",
            attach("compiled_then_wrapped", "wrapped_then_compiled", "compiled_step")),
        Row("bf16, autocast", YES,
            "bf16 parameters; float32 parameters under autocast", attach("bf16_parameters", "bf16_autocast")),
        Row("fp16 with GradScaler", YES,
            "infinities on one rank skip the step on all", attach("grad_scaler_with_infs_on_one_rank")),
        Row("gradient accumulation", YES, "one exchange for all micro-batches", attach("accumulation")),
        Row("activation checkpointing", YES,
            "reentrant and not, nested, with shared layers", attach("activation_checkpointing")),
        Row("unequal batches", YES, "sizes that differ between ranks", attach("uneven_batches")),
        Row("frozen and unused parameters", YES,
            "also where only some ranks use a parameter", attach("frozen_parameters", "unused_parameters")),
        Row("mixture of experts", LIMITS,
            "each worker has all experts, and uses some in each step. Experts divided among ranks are not supported",
            attach("mixture_of_experts")),
        Row("LoRA (PEFT)", YES,
            "only adapters are exchanged", (*attach("adapters"), *recipes("test_lora_sends_adapters_only"))),
        Row("QLoRA (bitsandbytes)", NEVER, "it needs a GPU"),
        Row("several models and optimizers", YES, "as a GAN trains", attach("two_models")),
        Row("sparse embeddings", YES, "SGD, SparseAdam and micro-batches", attach("sparse_tables")),
        Row("FSDP2 inside of each home", LIMITS,
            "as one FSDP2 job of all ranks, bit for bit; homes may have unlike numbers of ranks, leave and join. Not with "
            "sync=\"forward\", late averages, session.join(), LoadBalancer or float64; the automatic plan of "
            "homes of unlike sizes takes no local steps that are scaled to a norm",
            ("tests/multi/test_sharded_models.py::test_sites_train_as_one_fsdp_job",
             "tests/multi/test_sharded_models.py::test_residuals_survive_another_number_of_ranks",
             "tests/nightly/test_site_gpus.py::test_homes_of_other_sizes_join",
             "tests/nightly/test_session_auto_links.py::test_a_sharded_model_takes_local_steps_over_slow_links",
             *recipes("test_accelerate_trains_a_sharded_model_as_torch_does"))),
        Row("FSDP2 by the settings of Accelerate, Trainer, Lightning", LIMITS,
            "two places of two ranks, on CPUs: equal to a script that shards itself, resumed bit for bit; other meshes: "
            "`E-SHARDED`",
            ("tests/nightly/test_sharded_frameworks.py::test_accelerate_shards_each_site",
             "tests/nightly/test_sharded_frameworks.py::test_trainers_shard_each_site",
             "tests/nightly/test_sharded_frameworks.py::test_resumed_training_equals_the_uninterrupted_one",
             "tests/nightly/test_sharded_frameworks.py::test_meshes_across_sites_are_refused_with_the_line_to_write")),
        Row("FSDP1, HSDP, tensor parallelism", NO,
            "`E-SHARDED` names the module or parameter, and the mesh to use",
            ("tests/multi/test_refusals.py::test_unsupported_sharding_is_refused_by_name",)),
        Row("DeepSpeed, Megatron", NEVER, "they exchange gradients themselves"),
    ),
    "Frameworks": (
        Row("transformers' Trainer", YES,
            "equal to DDP bit for bit; resumed bit for bit, also under local steps", recipes(*SAME)),
        Row("Accelerate", YES, "the same", recipes(*SAME)),
        Row("Lightning", YES,
            "the same, and where Lightning starts the ranks", recipes(*SAME, "test_lightning_starts_the_ranks")),
        Row("TRL's SFTTrainer", YES, "LoRA on two ranks", recipes("test_lora_sends_adapters_only")),
    ),
    "Engines": (
        Row("torchrun", YES, "also restarts after a failure",
            ("tests/nightly/test_elastic_restart.py::test_documented_command_on_two_machines_survives_any_kill",)),
        Row("Ray Train 2.60", LIMITS,
            "a Ray of one machine, which restarts after a killed worker",
            ray("test_restart_after_a_kill_reaches_the_same_weights")),
        Row("Slurm 22.05", LIMITS,
            "two nodes on one machine: one job that is preempted and requeued, and a job for each node",
            slurm("test_one_job_continues_from_its_checkpoint_after_a_preemption",
                  "test_preempted_site_returns_to_the_running_job")),
        Row("Kubernetes 1.33 to 1.37", LIMITS,
            "manifests are valid by its schemas, and their commands run as processes; no cluster has run them",
            kubernetes("test_manifests_are_valid", "test_pods_that_stay_train_as_one_job",
                       "test_pod_is_replaced_and_the_server_resumes")),
        Row("SkyPilot 0.14", LIMITS,
            "its parser accepts the files, and their commands run as processes; no machine has been rented",
            sky("test_parser_accepts_both_files", "test_spot_machine_is_replaced")),
    ),
    "Machines": (
        Row("Linux, x86-64", YES, "all tests; kernels for AVX2 and AVX-512"),
        Row("Python 3.12, 3.13", LIMITS,
            "by hand: the wheel of the stable ABI is installed, plans and computes; no training was run with them"),
        Row("Linux, aarch64", LIMITS,
            "kernels run under an emulator, byte for byte; the whole package has never run there",
            ("tests/nightly/test_native_builds.py::test_neon_bytes_equal_those_of_every_other_body",)),
        Row("NVIDIA GPU", NEVER,
            "no GPU has run the GPU code yet; nvcc compiles the kernels, and tests run them on a CPU through a shim"),
        Row("NCCL, several GPUs in a machine", NEVER, "ranks of one machine are tested with Gloo"),
        Row("AMD GPU", NEVER, "torch calls it cuda; codecs run on the CPU"),
        Row("Apple GPU (mps), Intel GPU (xpu)", NEVER,
            "a test trains on a stand-in device, which only operations of torch reach",
            ("tests/nightly/test_other_machines.py::test_home_with_another_device_trains_with_a_cpu_as_two_cpus_do",)),
        Row("macOS", NEVER,
            "a test trains without the calls and files that only Linux has",
            ("tests/nightly/test_other_machines.py::test_job_trains_and_doctor_is_content_without_what_only_linux_has",)),
        Row("WSL 2", NEVER, "the code has no part that excludes it"),
        Row("Windows", NO, "`E-SYSTEM`: estimates and plans only; WSL 2 for the rest"),
        Row("containers", LIMITS,
            "the steps of Dockerfile and compose.yaml run in tests; no image has been built yet",
            ("tests/nightly/test_release.py::test_compose_file_trains",)),
    ),
}
