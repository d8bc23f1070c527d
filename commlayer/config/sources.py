"""Reads and checks the settings of one process: from arguments, environment variables and a TOML file."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from commlayer.config.addresses import host_port, is_loopback, split_port
from commlayer.config.settings import PREFIX, Config
from commlayer.errors import RecordError
from commlayer.records import complete

KEYS_TOKEN = "token"
"""Name of the file with the job's secret, inside a node's key folder."""
KEYS_REMEDY = "; `commlayer keys add NAME` creates a folder of keys to copy to the node"
TYPES: Mapping[str, Any] = get_type_hints(Config, include_extras=True)
"""Type of each setting by its name; the type's description names the allowed values."""


class Setting(NamedTuple):
    value: Any
    source: str
    text: bool
    """True: the value is text from the environment, to be converted. False: the value must have the right type."""


def read_config(argument: Config | Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None,
                cwd: str | Path = ".") -> Config:
    """Reads and checks all settings. A RecordError names the setting, its source, the value and the allowed values."""
    environ = os.environ if environ is None else environ
    if isinstance(argument, Config):
        argument = {name: getattr(argument, name) for name in argument.__struct_fields__}
    settings = from_file(environ, Path(cwd)) | from_environment(environ) | from_argument(argument or {})
    fields = {name: checked(name, setting) for name, setting in settings.items()}
    config = Config(**fields)

    def source(name: str) -> str:
        return settings[name].source if name in settings else "default"

    if config.dead_after_s < 2 * config.heartbeat_s:
        raise RecordError("E-SETTING",
                          f"dead_after_s: got {config.dead_after_s:g} from {source('dead_after_s')}, but it must be at "
                          f"least twice heartbeat_s, which is {config.heartbeat_s:g} from {source('heartbeat_s')}")
    if config.join:
        try:
            host_port(config.join)
        except ValueError as error:
            raise RecordError("E-ADDRESS", f"join: {error} (from {source('join')})") from None
    _check_plain_text(config)
    return _with_token(config, source)


def from_argument(argument: Mapping[str, Any]) -> dict[str, Setting]:
    return {_check_name(name, f"argument {name}"): Setting(value, f"argument {name}", False)
            for name, value in argument.items()}


def from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    # Kubernetes sets variables of this form for a service named commlayer.
    linked = {n for n, v in environ.items() if PREFIX + "SERVICE_HOST" in environ
              and (n.startswith((PREFIX + "SERVICE_", PREFIX + "PORT_")) or (n == PREFIX + "PORT" and "://" in v))}
    names = [n for n in sorted(environ) if n.startswith(PREFIX) and n != PREFIX + "CONFIG" and n not in linked]
    return {_check_name(n.removeprefix(PREFIX).lower(), f"environment variable {n}"):
            Setting(environ[n], f"environment variable {n}", True) for n in names}


def from_file(environ: Mapping[str, str], cwd: Path) -> dict[str, Setting]:
    config_path = environ.get(PREFIX + "CONFIG")
    path = cwd / (config_path or "commlayer.toml")
    if config_path == "" or (config_path is None and not path.is_file()):
        return {}
    try:
        fields = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecordError("E-SETTING", f"{PREFIX}CONFIG: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RecordError("E-SETTING", f"{path} is not TOML: {error}") from None
    return {_check_name(name, f"{path}:{name}"): Setting(value, f"{path}:{name}", False) for name, value in fields.items()}


def _check_name(name: str, source: str) -> str:
    if name not in TYPES:
        near = difflib.get_close_matches(name, TYPES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(TYPES)}"
        raise RecordError("E-SETTING", f"{name}: no such setting ({source}); {hint}")
    return name


def checked(name: str, setting: Setting) -> Any:
    try:
        return msgspec.convert(setting.value, complete(TYPES[name]), strict=not setting.text)
    except msgspec.ValidationError:
        allowed = next(m.description for m in TYPES[name].__metadata__)
        value = "a text" if name == "token" else repr(setting.value)
        raise RecordError("E-SETTING", f"{name}: got {value} from {setting.source}, but it must be {allowed}") from None


def _with_token(config: Config, source: Callable[[str], str]) -> Config:
    """Fills in the token from token_file, or else from the key folder if no other secret is set. The path `keys` becomes
    absolute."""
    if config.keys:
        # The process may change its working directory later.
        config = msgspec.structs.replace(config, keys=str(Path(config.keys).expanduser().absolute()))
    if not config.token_file:
        if not config.keys or config.token:
            return config
        path = Path(config.keys) / KEYS_TOKEN
        return msgspec.structs.replace(config, token=_secret_in(path, f"keys: {path} from {source('keys')}", KEYS_REMEDY))
    where = f"token_file: {config.token_file} from {source('token_file')}"
    if config.token:
        raise RecordError("E-SECRET", f"token_file: got {config.token_file} from {source('token_file')} and token from "
                                      f"{source('token')}, allowed: one of them")
    return msgspec.structs.replace(config, token=_secret_in(Path(config.token_file), where), token_file="")


def _secret_in(path: Path, where: str, remedy: str = "") -> str:
    """Reads a secret from a file. Error messages begin with `where` and end with `remedy`."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecordError("E-SETTING", f"{where} cannot be read: {why}{remedy}") from None
    try:
        token: str = msgspec.convert(text, complete(TYPES["token"]))
    except msgspec.ValidationError:
        token = ""
    if not token:
        raise RecordError("E-SECRET",
                          f"{where}: the file's text of {len(text)} characters is not a secret; it must be 8 or more visible "
                          "characters, without spaces")
    return token


def check_plain_text(name: str, host: str, config: Config, *, tunnel: bool = False) -> None:
    """Raises an error if unencrypted traffic to or from `host` is not allowed; the error names the setting `name`. `tunnel`: a
    tunnel connects `host` with other machines."""
    if (tunnel or not is_loopback(host)) and not config.insecure and not config.keys:
        where = "is the end of a tunnel from other machines," if tunnel else "is another machine"
        line = "give the home's line, NAME@HOST:PORT#TOKEN, or " if name == "join" else ""
        raise RecordError("E-PLAIN-TEXT",
                          f"{name}: {host} {where} and traffic is not encrypted: {line}set keys ({PREFIX}KEYS) to a "
                          "folder that `commlayer keys init` and `commlayer keys add NAME` create, or set insecure "
                          f"(insecure=True, --insecure, {PREFIX}INSECURE=1) if you trust the complete network between the "
                          "machines")


def _check_plain_text(config: Config) -> None:
    """Checks the settings bind, advertise and join: unencrypted traffic leaves the machine only with the user's consent."""
    advertised, port = split_port(config.advertise, "advertise")
    remote = [(name, host) for name, host in (("bind", config.bind), ("advertise", advertised)) if host]
    remote += [("join", host_port(config.join)[0])] if config.join else []
    for name, host in remote:
        check_plain_text(name, host, config, tunnel=name == "advertise" and bool(port))
    setting, host = ("advertise", advertised) if advertised else ("bind", config.bind)
    if host in ("0.0.0.0", "::"):
        raise RecordError("E-SETTING",
                          f"{setting}: {host} is not an address that other machines can connect to: set "
                          f"advertise (--advertise, {PREFIX}ADVERTISE) to this machine's address")
