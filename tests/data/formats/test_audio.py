"""Audio files, whole and as clips."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.audio.source import AudioFiles

soundfile = pytest.importorskip("soundfile")

RATE = 8000
KINDS = [
    ("a.wav", "PCM_16"),
    ("a.wav", "PCM_24"),
    ("a.wav", "PCM_U8"),
    ("a.wav", "FLOAT"),
    ("a.wav", "ULAW"),
    ("a.flac", "PCM_16"),
    ("a.ogg", "VORBIS"),
    ("a.opus", "OPUS"),
    ("a.mp3", "MPEG_LAYER_III"),
    ("a.aiff", "PCM_16"),
]


def tone(frames: int = 4000, channels: int = 2) -> np.ndarray:
    times = np.arange(frames)[:, None] / RATE
    return (0.4 * np.sin(2 * np.pi * (220 * (1 + np.arange(channels))) * times)).astype(np.float32)


def record(path: Path, kind: str = "PCM_16", rate: int = RATE, **size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    format = "OGG" if path.suffix == ".opus" else None
    soundfile.write(path, tone(**size), rate, subtype=kind, format=format)
    return path


def audio(path: Any, **options: Any) -> AudioFiles:
    source = penstock.open(path, **options)
    assert isinstance(source, AudioFiles)
    return source


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_files_have_the_values_that_soundfile_gives_them(tmp_path: Path, name: str, kind: str) -> None:
    path = record(tmp_path / name, kind)
    expected, rate = soundfile.read(path, dtype="float32", always_2d=True)
    (sample,) = audio(path)
    assert sample["rate"] == rate
    assert sample["audio"].dtype == np.float32
    rounding = 1e-6 if kind == "MPEG_LAYER_III" else 0  # mpg123's, which depends on where its memory lies
    assert np.allclose(sample["audio"], expected.T, atol=rounding, rtol=0)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_clips_are_the_parts_of_the_whole_file(tmp_path: Path, name: str, kind: str) -> None:
    path = record(tmp_path / name, kind)
    whole = audio(path)[0]
    clips = audio(path, frames=700, step=300)
    assert len(clips) == (whole["audio"].shape[1] - 700) // 300 + 1
    for number in [3, 0, len(clips) - 1]:
        clip = clips[number]
        assert clip["start"] == number * 300 / whole["rate"]
        tolerance = 1e-3 if kind in ("VORBIS", "OPUS") else 1e-6  # they decode from a packet before
        assert np.allclose(clip["audio"], whole["audio"][:, number * 300 : number * 300 + 700], atol=tolerance, rtol=0)


def test_clips_of_a_file_in_which_nobody_can_seek_are_those_of_the_whole(tmp_path: Path) -> None:
    path = record(tmp_path / "a.wav", "GSM610", channels=1)
    whole, clips = audio(path)[0]["audio"], audio(path, frames=700)
    assert len(clips) == whole.shape[1] // 700
    for number in (2, 0):
        assert np.array_equal(clips[number]["audio"], whole[:, 700 * number : 700 * (number + 1)])


def test_class_folders_make_labels_of_files_and_of_their_clips(tmp_path: Path) -> None:
    record(tmp_path / "cat" / "1.wav")
    record(tmp_path / "dog" / "2.flac", frames=8000)
    record(tmp_path / "dog" / "short.wav", frames=10)
    source = audio(tmp_path)
    assert (source.classes, source.class_to_idx) == (("cat", "dog"), {"cat": 0, "dog": 1})
    assert [sample["label"] for sample in source] == [0, 1, 1]
    clips = audio(tmp_path, frames=4000)
    assert clips.labels is not None
    assert clips.labels.tolist() == [sample["label"] for sample in clips] == [0, 1, 1]
    assert clips.schema["audio"].shape == (None, 4000)
    again = pickle.loads(pickle.dumps(clips)).select_fields(["label"])
    assert [*again] == [{"label": 0}, {"label": 1}, {"label": 1}]
    paths = [sample["path"] for sample in audio(tmp_path, fields=["path"])]
    assert [Path(path).name for path in paths] == ["1.wav", "2.flac", "short.wav"]


def test_a_batch_never_mixes_rates_unless_it_is_asked_to(tmp_path: Path) -> None:
    paths = [record(tmp_path / "a.wav"), record(tmp_path / "b.wav", rate=16000)]
    source = audio(paths)
    assert source[0]["rate"] == RATE
    with pytest.raises(RecordError, match="16000 frames a second, and 8000 are wanted"):
        source[1]
    with pytest.raises(SourceError, match=r"b\.wav has 16000 frames a second"):
        audio(paths, frames=100)
    with pytest.raises(RecordError, match="8000 frames a second, and 16000"):
        audio(paths, rate=16000)[0]
    for options in ({}, {"frames": 4000}):
        assert [sample["rate"] for sample in audio(paths, rate="any", **options)] == [RATE, 16000]


def test_float64_loses_nothing_of_doubles(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(-1, 1, (50, 1))
    soundfile.write(tmp_path / "a.wav", values, RATE, subtype="DOUBLE")
    assert np.array_equal(audio(tmp_path / "a.wav", dtype="float64")[0]["audio"], values.T)


def test_a_loader_gives_batches_of_clips(tmp_path: Path) -> None:
    clips = audio(record(tmp_path / "a.wav"), frames=500)
    batches = list(penstock.DataLoader(clips, batch_size=4))
    assert [batch["audio"].shape for batch in batches] == [torch.Size([4, 2, 500])] * 2


def test_truncated_and_foreign_files_are_errors_and_can_be_left_out(tmp_path: Path) -> None:
    good = record(tmp_path / "a.wav")
    cut = tmp_path / "b.wav"
    cut.write_bytes(good.read_bytes()[:-1000])
    cut_flac = tmp_path / "c.flac"
    cut_flac.write_bytes(record(tmp_path / "whole" / "c.flac").read_bytes()[:-1000])
    text = tmp_path / "d.wav"
    text.write_text("no audio")
    source = audio([good, cut, cut_flac, text])
    assert source[0]["audio"].shape == (2, 4000)
    for number in (1, 2, 3):
        with pytest.raises(RecordError, match=r"states|decoded"):
            source[number]
    with pytest.raises(RecordError, match="states 16000 bytes of audio, and has 15000"):
        audio([good, cut], frames=100)
    with pytest.warns(UserWarning, match="left out"):
        assert len(audio([cut, good, text], frames=1000, errors="skip")) == 4


def test_a_header_of_unknown_length_is_no_truncated_file(tmp_path: Path) -> None:
    data = bytearray(record(tmp_path / "a.wav").read_bytes())
    struct.pack_into("<I", data, data.index(b"data") + 4, 0xFFFFFFFF)
    (tmp_path / "piped.wav").write_bytes(data)
    assert audio(tmp_path / "piped.wav")[0]["audio"].shape == (2, 4000)


def test_a_recording_that_was_broken_off_is_not_read_as_empty(tmp_path: Path) -> None:
    path = record(tmp_path / "a.wav")
    data = bytearray(path.read_bytes())
    for size in (4, data.index(b"data") + 4):
        struct.pack_into("<I", data, size, 0)
    (tmp_path / "broken.wav").write_bytes(data)
    with pytest.raises(RecordError, match=r"broken.wav: record 0: its header states no length, as of a recording"):
        audio(tmp_path / "broken.wav")[0]
    with pytest.raises(RecordError, match=r"broken.wav: record 1: its header states no length"):
        audio([path, tmp_path / "broken.wav"], frames=100)


def test_a_sample_larger_than_allowed_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = record(tmp_path / "a.wav")
    with pytest.raises(RecordError, match=r"32000 bytes of audio; max_record_nbytes is 31999"):
        audio(path, max_record_nbytes=31999)[0]


@pytest.mark.parametrize("options", [{"frames": 0}, {"step": 3}, {"frames": 1, "step": -1}, {"dtype": "int16"}])
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        audio(record(tmp_path / "a.wav"), **options)


def test_files_shorter_than_a_clip_are_no_source(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="none of the 1 files"):
        audio(record(tmp_path / "a.wav"), frames=5000)


@pytest.mark.parametrize("before", [b"", b"ID3\x04\x00\x00\x00\x00\x41\x10Info\0\0\0\x0f" + bytes(0x2088)])
def test_an_mp3_file_that_does_not_state_its_length_is_refused_with_the_reason(tmp_path: Path, before: bytes) -> None:
    soundfile.write(tmp_path / "a.mp3", tone(20_000), 44100, bitrate_mode="VARIABLE", compression_level=0.5)
    data = (tmp_path / "a.mp3").read_bytes()
    (tmp_path / "a.mp3").write_bytes(before + data)
    (tmp_path / "b.mp3").write_bytes(before + data[data.index(data[:2], 4) :])  # without the frame that states it
    with pytest.raises(RecordError, match=r"b\.mp3: .*does not state its length.*ffmpeg -i this.mp3 -c copy new.mp3"):
        audio(tmp_path / "b.mp3")[0]
    with pytest.warns(UserWarning, match="left out"):
        assert len(audio([tmp_path / "a.mp3", tmp_path / "b.mp3"], frames=5000, errors="skip")) == 4


def test_a_flac_file_that_does_not_state_its_length_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = record(tmp_path / "a.flac")
    data = bytearray(path.read_bytes())
    data[21] &= 0xF0  # the last 36 of the bits of STREAMINFO before its MD5
    data[22:26] = bytes(4)
    piped = tmp_path / "piped.flac"
    piped.write_bytes(data)
    with pytest.raises(RecordError, match=r"does not state its length.*writes it anew"):
        audio(piped)[0]
    with pytest.raises(RecordError, match=r"piped\.flac: record 1: its header does not state its length"):
        audio([path, piped], frames=100)
    assert audio([piped, path])[1]["audio"].shape == (2, 4000)
