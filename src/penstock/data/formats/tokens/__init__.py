"""Token files: documents as NumPy arrays or bare integers, cut or packed to sequences of one length."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.tokens import source

    return Implementation(
        open_files=source.open_files,
        writer=source.TokenWriter,
        why_unsupported=source.why_unsupported,
    )


TOKENS = Format(name="tokens", suffixes=(".npy", ".bin"), load=_load, lossless_options={"pack": False})
