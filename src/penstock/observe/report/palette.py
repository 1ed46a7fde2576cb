"""The colours of the page by role, for light and dark backgrounds.

Text has a contrast of at least 4.5 to its background, shapes of at
least 3 (WCAG 2.2, 1.4.3 and 1.4.11), except `idle`, the absence of work.
"""

from __future__ import annotations

LIGHT = {
    "ground": "#f6f7f9",
    "card": "#ffffff",
    "ink": "#1b1f26",
    "muted": "#586070",
    "rule": "#dfe3e9",
    "accent": "#1f5fd0",
    "good": "#0f7a4d",
    "bad": "#b4231a",
    "tint": "#eef3fc",
    "step": "#3b76df",
    "waiting": "#d8491a",
    "transport": "#8f5fd6",
    "outside": "#878f9d",
    "fetch": "#0c8a78",
    "collate": "#b57d00",
    "idle": "#cfd5dd",
    "rate": "#2a66d1",
    "ready": "#0d8b79",
    "held": "#b67e01",
    "host": "#3a75de",
    "slots": "#0b8977",
    "device": "#c22a63",
    "weights": "#2b66c9",
    "gradients": "#b27a00",
    "optimizer": "#0a8573",
    "reserved": "#8e5ed5",
    "busy": "#c32b64",
}
"""For light backgrounds."""

DARK = {
    "ground": "#0f1216",
    "card": "#181c22",
    "ink": "#e8ebf0",
    "muted": "#a3acba",
    "rule": "#2d343e",
    "accent": "#86b1ff",
    "good": "#52d39b",
    "bad": "#ff8a80",
    "tint": "#1b2636",
    "step": "#6c9ffb",
    "waiting": "#ff8350",
    "transport": "#bd9af5",
    "outside": "#6f7887",
    "fetch": "#3cc7b0",
    "collate": "#e8b13c",
    "idle": "#39414c",
    "rate": "#74a5fc",
    "ready": "#3dc8b1",
    "held": "#e9b23d",
    "host": "#6b9efa",
    "slots": "#3bc6af",
    "device": "#ff7fa9",
    "weights": "#6b9efa",
    "gradients": "#e9b23d",
    "optimizer": "#3bc6af",
    "reserved": "#bc99f4",
    "busy": "#ff80aa",
}
"""For dark backgrounds."""


def css() -> str:
    """Return the colours as CSS custom properties, the dark ones for readers who prefer a dark scheme."""
    return (
        f":root{{{_properties(LIGHT)}color-scheme:light}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_properties(DARK)}color-scheme:dark}}}}"
    )


def _properties(colours: dict[str, str]) -> str:
    return "".join(f"--{role}:{colour};" for role, colour in colours.items())
