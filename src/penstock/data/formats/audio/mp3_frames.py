"""The length of MP3 files whose header does not state it, counted from the headers of their frames.

    file     tags, then frames one after another, then tags
    frame    a header of 4 bytes, what it describes, and audio of 1152 samples a channel (576 at 24 kHz and below)
    header   11 bits 1; version (2 bits: 3 is MPEG-1, 2 is MPEG-2, 0 is MPEG-2.5); layer (2 bits: 1 is III); a bit;
             bit rate (4 bits); sampling rate (2 bits); padding (1 bit: the frame has a byte more); 9 bits

The first frame may be none of audio, but one that states how many follow: "Xing" or "Info", flags (bit 0: the number
is there) and the number (uint32); or "VBRI", which always has it. Without, libsndfile guesses the length from the size
of the file and the first frame, and reads no further.
"""

from __future__ import annotations

import mmap
import re

_KBITS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_KBITS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
"""A second, by the header's 4 bits; 0 where it says nothing of the frame's size, or is invalid."""
_RATES = {3: (44100, 48000, 32000, 0), 2: (22050, 24000, 16000, 0), 0: (11025, 12000, 8000, 0)}
"""Samples a second, by version and the header's 2 bits."""
_STATES_LENGTH = re.compile(rb"VBRI|(?:Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f]", re.DOTALL)
_TAG = re.compile(rb"VBRI|Xing|Info")
_TAG_END = 50
"""The first frame has its tag before this byte."""


def count_unstated(path: str) -> int | None:
    """Return the samples a channel of a Layer III file that does not state them; None if it does, or has no frames."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = _next_frame(data, _tags_end(data))
        first = data[begin : begin + _TAG_END]
        if not first or _STATES_LENGTH.search(first):
            return None
        frames = _count_frames(data, begin) - bool(_TAG.search(first))
        return frames * (1152 if _version(first) == 3 else 576)


def _tags_end(data: mmap.mmap) -> int:
    """Return where the ID3v2 tags at the beginning end: 10 bytes each, the last 4 a size of 7 bits a byte, and that."""
    at = 0
    while data[at : at + 3] == b"ID3" and len(data) >= at + 10:
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)  # the same 10 bytes may follow
    return at


def _count_frames(data: mmap.mmap, at: int) -> int:
    """Return how many whole frames there are from one on; what lies between is skipped."""
    frames, kind = 0, _kind(data[at : at + 4])
    while at < len(data):
        header = data[at : at + 4]
        nbytes = _frame_nbytes(header)
        if nbytes and _kind(header) == kind:
            at += nbytes
            frames += at <= len(data)
        else:
            at = _next_frame(data, at + 1)
    return frames


def _next_frame(data: mmap.mmap, at: int) -> int:
    """Return where the next frame begins that another one of its kind, or the file's end, follows; else the end."""
    while (at := data.find(b"\xff", at)) >= 0:
        header = data[at : at + 4]
        end = at + _frame_nbytes(header)
        following = data[end : end + 4]
        if end > at and (end == len(data) or (_frame_nbytes(following) and _kind(following) == _kind(header))):
            return at
        at += 1
    return len(data)


def _kind(header: bytes) -> tuple[int, int]:
    """Return what all frames of a file have in common: version, layer and sampling rate."""
    return header[1] & 0xFE, header[2] & 0x0C


def _version(header: bytes) -> int:
    return header[1] >> 3 & 3


def _frame_nbytes(header: bytes) -> int:
    """Return the bytes of the frame that a header begins; 0 if it is none of Layer III, or does not say."""
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2 or _version(header) not in _RATES:
        return 0
    is_first = _version(header) == 3
    kbits = (_KBITS_1 if is_first else _KBITS_2)[header[2] >> 4]
    rate = _RATES[_version(header)][header[2] >> 2 & 3]
    if not kbits or not rate:
        return 0
    return (144_000 if is_first else 72_000) * kbits // rate + (header[2] >> 1 & 1)
