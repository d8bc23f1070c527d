"""docs/how-to/skypilot.md: SkyPilot's parser accepts its files, and their commands train on this machine."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from support.engines import Machines, environment_of, free_port, home_is_replaced, replaced

pytestmark = pytest.mark.timeout(900)
PAGE = (ROOT / "docs" / "how-to" / "skypilot.md").read_text("utf-8")
FILES = dict(zip(("server.yaml", "home.yaml"), re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL), strict=True))
TASKS: dict[str, dict[str, Any]] = {name: yaml.safe_load(text) for name, text in FILES.items()}
READ = """
import json, sys, yaml
import sky

task = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), env_overrides=json.loads(sys.argv[2]))
print(json.dumps({"run": task.run, "setup": task.setup, "envs": task.envs, "mounts": task.file_mounts, "nodes": task.num_nodes,
                  "resources": [{"spot": one.use_spot, "ports": one.ports, "recovery": one.job_recovery}
                                for one in task.resources]}))
"""
"""A process of its own: SkyPilot writes into the home folder."""
OPTIONS = """
import json
from sky.client.cli.command import cli

commands = cli.commands | {f"jobs {name}": command for name, command in cli.commands["jobs"].commands.items()}
print(json.dumps({name: [option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)]
                  for name, command in commands.items()}))
"""
MISSING = "needs skypilot, which `make engines` installs"


def read(folder: Path, text: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """What SkyPilot makes of a file, in a folder with the files that the page puts there."""
    if importlib.util.find_spec("sky") is None:
        pytest.skip(MISSING)
    for name in ("server", "home-1", "home-2"):
        (folder / "keys" / "nodes" / name).mkdir(parents=True, exist_ok=True)
    (folder / "task.yaml").write_text(text)
    return subprocess.run([sys.executable, "-c", READ, "task.yaml", json.dumps([*settings.items()])], cwd=folder, text=True,
                          env=environment_of(folder) | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}, capture_output=True,
                          timeout=200)


def test_parser_accepts_both_files(tmp_path: Path) -> None:
    tasks = []
    given = {"server.yaml": {"ADDRESS": "1.2.3.4"}, "home.yaml": {"HOME_NAME": "home-2", "SERVER": "1.2.3.4"}}
    for name, settings in given.items():
        done = read(tmp_path, FILES[name], **settings)
        assert done.returncode == 0, done.stderr[-3000:]
        tasks.append(json.loads(done.stdout.splitlines()[-1]))
    server, home = tasks
    assert server["resources"] == [{"spot": False, "ports": ["7000-7001"], "recovery": None}]
    assert len(home["resources"]) == 2, "either of two cards"
    for one in home["resources"]:
        assert one["spot"]
        assert one["recovery"] == {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 3}
    assert home["mounts"] == {"~/commlayer-keys": "keys/nodes/home-2"}
    assert server["mounts"] == {"~/commlayer-keys": "keys/nodes/server"}
    assert (home["envs"]["SERVER"], server["nodes"], home["nodes"]) == ("1.2.3.4", 1, 1)


@pytest.mark.parametrize(("old", "new"), [("use_spot", "use_spots"), ("job_recovery", "recovery"), ("file_mounts", "files")])
def test_unknown_field_is_refused(old: str, new: str, tmp_path: Path) -> None:
    done = read(tmp_path, replaced(FILES["home.yaml"], {old: new}), SERVER="1.2.3.4")
    assert done.returncode != 0
    assert new in done.stderr


def test_home_without_the_address_of_the_server_is_refused(tmp_path: Path) -> None:
    done = read(tmp_path, FILES["home.yaml"])
    assert done.returncode != 0
    assert "SERVER" in done.stderr


def test_commands_exist_with_these_options(tmp_path: Path) -> None:
    """All that the page writes after `sky`."""
    if importlib.util.find_spec("sky") is None:
        pytest.skip(MISSING)
    done = subprocess.run([sys.executable, "-c", OPTIONS], text=True, env=environment_of(tmp_path),
                          capture_output=True, timeout=200)
    options = json.loads(done.stdout.splitlines()[-1])
    lines = re.findall(r"(?=\bsky ((?:jobs )?(?:launch|exec|status))\b([^\n`;)]*))", PAGE)
    assert len(lines) == 6
    for command, rest in lines:
        own = re.split(r"\$\(|'", rest)[0]  # without commands inside it
        assert set(re.findall(r"(?<=\s)--[a-z-]+", own)) <= set(options[command]), rest


def test_spot_machine_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    machines, port = Machines(tmp_path), str(free_port())
    (lines,) = re.findall(r"^```\n(commlayer keys init\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    runs = {name: replaced(task["run"], {":7000": f":{port}"}) for name, task in TASKS.items()}

    def start(name: str, run: str, **settings: str) -> None:
        """As SkyPilot does: copies the files, and runs the command in a shell."""
        mounted = tmp_path / name / "commlayer-keys"
        if not mounted.exists():
            shutil.copytree(tmp_path / "user" / "keys" / "nodes" / name, mounted)
        machines.run(name, "bash", "-c", run, **settings)

    try:
        assert machines.run("user", "sh", "-ec", lines).wait(100) == 0
        start("server", runs["server.yaml"], ADDRESS="")
        start("server", runs["server.yaml"], ADDRESS="127.0.0.1")
        home_is_replaced(machines, lambda name: start(name, runs["home.yaml"], HOME_NAME=name, SERVER="127.0.0.1",
                                                      SKYPILOT_NUM_GPUS_PER_NODE="1"), ("home-1", "home-2"))
        machines.stop("home-1")
    finally:
        machines.close()
