"""Names that would do harm if they were taken for markup, and reports full of them."""

from __future__ import annotations

from typing import Any

ATTACK = "document.title='taken'"
NAMES = (
    f'</script><img src=x onerror="{ATTACK}">',
    f"</style><script>{ATTACK}</script>",
    f'"><svg onload={ATTACK}>',
    f"' onmouseover='{ATTACK}' x='",
    f"</title><script>{ATTACK}</script>",
    f'--><!--<iframe srcdoc="<script>parent.{ATTACK}</script>">',
    "javascript:alert(1)",
    "\u202egnp.exe\u202c",
    "nul\x00byte",
    "two\nlines\r\nand\ttabs",
    "&lt;b&gt;&amp;#x3c;",
    "]]><![CDATA[<b>",
    "url(http://127.0.0.1:9/x)",
    "half\ud800a pair",
    "long" * 400,
    "日本語のオペレーター",
    "",
)
_KEPT = {"level", "measure", "status", "partitioner"}
"""Members that have one of a few values, which a reader of the format has checked."""


def hostile(value: Any, name: str = "", count: list[int] | None = None) -> Any:
    """A document with every text replaced by a hostile one, in turn; uids stay one to one."""
    count = [0] if count is None else count
    if isinstance(value, dict):
        if name == "properties":
            return {f"{text}{i}": text for i, text in enumerate(NAMES)}
        return {key: hostile(item, key, count) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hostile(item, name, count) for item in value]
    if not isinstance(value, str) or name in _KEPT:
        return value
    if name in ("uid", "from", "to", "operator", "chain"):
        return f"{NAMES[sum(value.encode()) % len(NAMES)]}{value}"
    count[0] += 1
    return NAMES[count[0] % len(NAMES)]
