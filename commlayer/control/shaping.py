"""The setting `shape`: links that are slow on purpose, for the demo. Knows the setting's words and who is on which node."""

from __future__ import annotations

from commlayer.errors import RecordError
from commlayer.records import View
from commlayer.transport.protocol import SERVER_BASE, Transport
from commlayer.transport.shaped import shaped
from commlayer.transport.shaped_links import HostLink, ShapedLinks

ALLOWED = "path=FILE,hosts=N,up_bps=X,down_bps=X,delay_s=X (delay one way), or empty for none"


def shaped_by(setting: str, transport: Transport, view: View) -> Transport:
    """The transport itself, or one whose peers on other nodes are as far and as slow as the setting says."""
    if not setting:
        return transport
    nodes = {m.rank: m.node for m in view.members} | {SERVER_BASE + s.id: s.node for s in view.servers}
    return shaped(transport, parse_shape(setting), nodes)


def parse_shape(setting: str) -> ShapedLinks:
    """All hosts alike. Processes that name the same path share the links' state."""
    try:
        words = dict(part.split("=", 1) for part in setting.split(","))
        path, hosts = words.pop("path"), int(words.pop("hosts"))
        link = HostLink(**{name: float(value) for name, value in words.items()})
        return ShapedLinks(path, [link] * hosts)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"shape: got {setting!r} ({error}), allowed: {ALLOWED}") from None
