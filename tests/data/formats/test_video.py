"""Clips of videos."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.video import frame_index, frame_index_cache
from penstock.data.formats.video.source import Clips, open_files
from penstock.data.schema import Selection
from penstock.data.storage.storage import Storage

av = pytest.importorskip("av")

FILES: dict[str, tuple[str, str, dict[str, str]]] = {
    "B-frames in MP4": ("a.mp4", "libx264", {"g": "12", "bf": "3"}),
    "B-frames in MKV": ("a.mkv", "libx264", {"g": "12", "bf": "3"}),
    "open groups": ("a.mp4", "libx264", {"x264-params": "open-gop=1:keyint=12:min-keyint=12:scenecut=0:bframes=3"}),
    "intra refresh": ("a.mp4", "libx264", {"x264-params": "intra-refresh=1:keyint=12"}),
    "HEVC with open groups": (
        "a.mp4",
        "libx265",
        {
            "x265-params": "log-level=none:open-gop=1:keyint=12:min-keyint=12:scenecut=0:bframes=3:"
            "pools=1:frame-threads=1"
        },
    ),
    "VP8 with hidden frames": ("a.webm", "libvpx", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "VP9": ("a.webm", "libvpx-vp9", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "transport stream": ("a.ts", "libx264", {"g": "12", "bf": "3"}),
    "AVI": ("a.avi", "mpeg4", {"g": "12"}),
    "AVI with B-frames": ("a.avi", "mpeg4", {"g": "12", "bf": "2"}),
    "AVI of H.264": ("a.avi", "libx264", {"g": "12", "bf": "2"}),
    "MPEG program stream": ("a.mpg", "mpeg2video", {"g": "12", "bf": "2"}),
    "each frame a keyframe": ("a.mov", "libx264", {"g": "1"}),
}
COUNT = 50


def picture(number: int, height: int = 48, width: int = 64) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([(rows * 3 + number * 7) % 256, (columns * 2 + number * 5) % 256, (rows + columns) % 256], -1)
    pixels[8 + number % 20 : 16 + number % 20, 8:24] = number * 5 % 256
    return pixels.astype(np.uint8)


def record(
    path: Path,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    *,
    count: int = COUNT,
    times_ms: list[int] | None = None,
    shape: tuple[int, int] = (48, 64),
) -> Path:
    """Make a video."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if codec not in av.codecs_available:
        pytest.skip(f"this ffmpeg has no {codec}")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=options or {"g": "12", "bf": "2"})
        stream.height, stream.width = shape
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        if times_ms is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(picture(number, *shape), format="rgb24")
            if times_ms is not None:
                frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def decoded(path: Path) -> tuple[np.ndarray, list[float]]:
    """Return all frames that can be decoded, from the beginning on, and their times."""
    frames = []
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for packet in container.demux(video=0):
            with contextlib.suppress(av.error.InvalidDataError):
                frames += packet.decode()
        pixels = np.stack([frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in frames])
        return pixels, [frame.time for frame in frames]


def copied(path: Path, other: Path, *, earlier: int = 0, without: int = 0, movflags: str = "") -> Path:
    """Copy a video's packets: all times moved, or without the first ones."""
    options = {"avoid_negative_ts": "disabled", "use_editlist": "1"} if earlier else {}
    options |= {"movflags": movflags} if movflags else {}
    with av.open(str(path)) as container, av.open(str(other), "w", options=options) as copy:
        stream = container.streams.video[0]
        target = copy.add_stream_from_template(stream)
        for packet in list(container.demux(stream))[without:]:
            if packet.dts is not None:
                packet.pts, packet.dts = packet.pts - earlier, packet.dts - earlier
                packet.stream = target
                copy.mux(packet)
    return other


def clips(path: Path | str | list[str], fields: object = None, **options: Any) -> Clips:
    paths = path if isinstance(path, list) else [str(path)]
    errors = options.pop("errors", "raise")
    return open_files(paths, storage=Storage(), fields=Selection.of(fields), errors=errors, **options)  # type: ignore[arg-type]


# ── the same frames as decoding all gives ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("frames", "stride", "step"), [(4, 1, 3), (5, 3, None), (1, 1, 1), (50, 1, 1)])
def test_clips_are_frames_of_the_whole(tmp_path: Path, name: str, frames: int, stride: int, step: int | None) -> None:
    file, codec, options = FILES[name]
    path = record(tmp_path / file, codec, options)
    whole, _ = decoded(path)
    source = clips(path, frames=frames, stride=stride, step=step)
    step = step or frames * stride
    assert len(source) == (len(whole) - ((frames - 1) * stride + 1)) // step + 1
    order = list(range(len(source)))
    for shuffled in (order, random.Random(0).sample(order, len(order))):
        for number in shuffled:
            expected = whole[number * step : number * step + frames * stride : stride]
            np.testing.assert_array_equal(source[number]["video"], expected[:frames])
    source.close()


def test_frames_at_any_times_are_found_and_tell_them(tmp_path: Path) -> None:
    chance = random.Random(0)
    times = sorted(chance.sample(range(9000), 60))
    path = record(tmp_path / "a.mkv", times_ms=times, count=60)
    whole, seconds = decoded(path)
    source = clips(path, frames=3, step=2)
    for number in random.Random(1).sample(range(len(source)), len(source)):
        sample = source[number]
        np.testing.assert_array_equal(sample["video"], whole[number * 2 : number * 2 + 3])
        assert sample["start"] == pytest.approx(seconds[number * 2])
    source.close()


@pytest.mark.parametrize("frames_cut", [0, 5, 10, 13, 25])
def test_what_an_edit_list_cuts_out_is_no_frame(tmp_path: Path, frames_cut: int) -> None:
    whole = record(tmp_path / "whole.mp4", options={"g": "12", "bf": "3"})
    path = copied(whole, tmp_path / "cut.mp4", earlier=frames_cut * 512)
    expected, seconds = decoded(path)
    assert len(expected) == COUNT - frames_cut
    source = clips(path, frames=1)
    assert len(source) == len(expected)
    for number in random.Random(0).sample(range(len(source)), len(source)):
        np.testing.assert_array_equal(source[number]["video"][0], expected[number])
        assert source[number]["start"] == pytest.approx(seconds[number])
    source.close()


@pytest.mark.parametrize("packets_cut", [1, 3, 12, 14, 20])
@pytest.mark.parametrize("name", ["B-frames in MP4", "open groups"])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_frames_before_the_first_keyframe_are_none(tmp_path: Path, name: str, suffix: str, packets_cut: int) -> None:
    file, codec, options = FILES[name]
    path = copied(record(tmp_path / file, codec, options), tmp_path / f"cut{suffix}", without=packets_cut)
    expected, _ = decoded(path)
    source = clips(path, frames=1)
    assert len(source) == len(expected)
    for number in random.Random(0).sample(range(len(source)), len(source)):
        np.testing.assert_array_equal(source[number]["video"][0], expected[number])
    source.close()


def test_a_size_is_resize_and_center_crop_of_torchvision_within_1(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4", shape=(96, 160))
    whole, _ = decoded(path)
    first = Image.fromarray(whole[0].transpose(1, 2, 0))
    covering = np.asarray(first.resize((80, 48), Image.Resampling.BILINEAR))[:, 16:64].transpose(2, 0, 1)
    stretched = np.asarray(first.resize((32, 40), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    source = clips(path, frames=2, size=48)
    assert np.abs(source[0]["video"][0].astype(int) - covering).max() <= 1
    source.close()
    source = clips(path, frames=2, size=(40, 32), resize="stretch")
    assert np.abs(source[0]["video"][0].astype(int) - stretched).max() <= 1
    source.close()
    assert source.schema["video"].words() == "uint8[2, 3, 40, 32]"
    assert clips(path, frames=2).schema["video"].words() == "uint8[2, 3, ?, ?]"


# ── folders, fields, loaders ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, count in (("run/a.mp4", 20), ("jump/b.mp4", 9), ("jump/short.mp4", 3), ("jump/c.mkv", 8)):
        record(tmp_path / "data" / name, count=count)
    return tmp_path / "data"


def test_class_folders_make_labels_and_short_videos_no_clips(root: Path) -> None:
    source = clips(root, ["label", "path"], frames=4)
    found = [(Path(sample["path"]).name, sample["label"]) for sample in source]
    assert found == [("b.mp4", 0)] * 2 + [("c.mkv", 0)] * 2 + [("a.mp4", 1)] * 5
    np.testing.assert_array_equal(source.labels, [0] * 4 + [1] * 5)
    assert clips(root, labels=False, frames=4).labels is None
    assert source.classes == ("jump", "run")
    assert source.class_to_idx == {"jump": 0, "run": 1}


def test_fields_are_what_was_asked_for(root: Path) -> None:
    source = clips(root, frames=4)
    assert sorted(source[0]) == ["label", "start", "video"]
    assert sorted(source.schema) == ["label", "start", "video"]
    assert list(source.select_fields(["start"])[1]) == ["start"]
    assert sorted(clips(str(root / "run" / "a.mp4"), {"x": "video"}, frames=2)[0]) == ["x"]
    with pytest.raises(SourceError, match="sound"):
        clips(root, ["sound"])
    source.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_make_batches_of_it(root: Path, num_workers: int) -> None:
    source = clips(root, frames=4, size=32)
    expected = np.stack([sample["video"] for sample in source])
    loader = penstock.DataLoader(source, batch_size=9, num_workers=num_workers)
    (batch,) = [{name: value.clone() for name, value in batch.items()} for batch in loader]
    (other,) = torch.utils.data.DataLoader(source, batch_size=9, num_workers=num_workers)
    for one in (batch, other):
        np.testing.assert_array_equal(one["video"].numpy(), expected)
        assert one["label"].tolist() == [0] * 4 + [1] * 5
    source.close()


def test_threads_read_the_same_file(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4")
    whole, _ = decoded(path)
    source = clips(path, frames=2, step=1)
    order = random.Random(2).sample(range(len(source)), len(source)) * 3
    with ThreadPoolExecutor(4) as threads:
        for number, sample in zip(order, threads.map(source.__getitem__, order), strict=True):
            np.testing.assert_array_equal(sample["video"], whole[number : number + 2])
    source.close()


def test_a_source_travels_without_open_files(tmp_path: Path) -> None:
    source = clips(record(tmp_path / "a.mp4"), frames=2)
    expected = source[3]
    other = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(other[3]["video"], expected["video"])
    other.close()
    source.close()


def test_no_more_than_some_files_stay_open(tmp_path: Path) -> None:
    for number in range(12):
        record(tmp_path / f"{number:02d}.mp4", count=4)
    source = clips(tmp_path, frames=4)
    assert len(list(source)) == 12
    names = [os.readlink(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd") if _is_link(entry)]
    assert sum(name.startswith(str(tmp_path)) for name in names) == 8
    source.close()


def _is_link(entry: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{entry}")


# ── what is broken, and what is too much ────────────────────────────────────────────────────────────────────


def test_what_is_no_video_is_an_error_or_left_out(root: Path) -> None:
    (root / "run" / "bad.mp4").write_bytes(b"no video at all" * 99)
    (root / "run" / "empty.mp4").write_bytes(b"")
    with pytest.raises(RecordError, match=r"bad\.mp4"):
        clips(root, frames=4)
    with pytest.warns(UserWarning, match="left out") as caught:
        source = clips(root, frames=4, errors="skip")
    assert len(caught) == 2
    assert len(source) == 9


def test_a_playlist_with_a_videos_name_opens_nothing(tmp_path: Path) -> None:
    good = record(tmp_path / "good.mp4")
    for name, text in (
        ("list.mp4", f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\n{good}\n#EXT-X-ENDLIST\n"),
        ("concat.mp4", f"ffconcat version 1.0\nfile {good}\n"),
        ("beside.mp4", "ffconcat version 1.0\nfile good.mp4\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(RecordError, match=name):
            clips(tmp_path / name)


def box(kind: bytes, *numbers: int, text: bytes = b"") -> bytes:
    return struct.pack(f">I4s{len(numbers)}I", 8 + 4 * len(numbers) + len(text), kind, *numbers) + text


MANY = 5_000_000
HOSTILE: dict[str, tuple[bytes, str]] = {
    "frames of one size": (box(b"stsz", 0, 1, MANY), "tables state 50"),
    "frames of half a byte": (box(b"stz2", 0, 4, MANY), "tables state 50"),
    "frames of a fragment": (box(b"free", text=box(b"trun", 0, MANY)), "tables state 50"),
    "one part again and again": (box(b"elst", 0, 1000, text=bytes(12_000)), "tables state 50"),
    "frames of chunks": (box(b"stsc", 0, 1, 1, 1 << 30, 1), "tables state"),
    "groups": (box(b"sgpd", 1 << 24, 0x73796E63, 1, MANY), "tables state 5"),
    "names": (box(b"keys", 0, MANY), "tables state 5"),
    "a compressed header": (box(b"moov", text=box(b"cmov", text=bytes(40))), "'cmov', which is not read"),
    "fragments in a header": (box(b"moov", text=box(b"sidx", text=bytes(40))), "'sidx', which is not read"),
    "fragments in the data": (box(b"sidx", 0, 1, 25, 0, 4, 1, 100, 1, 0) + box(b"free", text=bytes(200)), "no box"),
    "a box without an end": (struct.pack(">I4s", 1 << 30, b"uuid"), "ends behind the end of the file"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_mp4_whose_tables_state_more_than_it_can_hold_is_not_opened(tmp_path: Path, kind: str) -> None:
    appended, words = HOSTILE[kind]
    path = record(tmp_path / "a.mp4")
    assert len(clips(path)) == 3
    path.write_bytes(path.read_bytes() + appended)
    with pytest.raises(RecordError, match=words):
        clips(path)


def test_a_first_box_of_another_kind_does_not_keep_the_tables_from_being_looked_at(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4")
    path.write_bytes(box(b"abcd", 0) + path.read_bytes() + HOSTILE["frames of one size"][0])
    with pytest.raises(RecordError, match="cannot be decoded"):
        clips(path)


@pytest.mark.parametrize("flags", ["", "+global_sidx"])
def test_fragments_with_and_without_an_index_are_read(tmp_path: Path, flags: str) -> None:
    whole = record(tmp_path / "whole.mp4")
    path = copied(whole, tmp_path / "a.mp4", movflags=f"frag_keyframe+empty_moov+default_base_moof{flags}")
    assert (b"sidx" in path.read_bytes()) == bool(flags)
    expected = decoded(whole)[0]
    for number, sample in enumerate(clips(path, frames=5)):
        np.testing.assert_array_equal(sample["video"], expected[number * 5 : number * 5 + 5])


def test_frames_and_clips_that_are_too_large_are_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4")
    with pytest.raises(RecordError, match="max_pixels"):
        clips(path, max_pixels=64 * 48 - 1)
    with pytest.raises(RecordError, match="max_record_nbytes"):
        clips(path, frames=4, max_record_nbytes=4 * 3 * 64 * 48 - 1)[0]
    with pytest.raises(OptionError, match="bytes"):
        clips(path, frames=4, size=48, max_record_nbytes=4 * 3 * 48 * 48 - 1)
    clips(path).close()


def test_an_index_is_kept_and_only_new_and_changed_videos_are_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(path: str, local: str, max_pixels: int) -> frame_index.FrameIndex:
        read.append(Path(path).name)
        return frame_index.read_frame_index(path, local, max_pixels)

    monkeypatch.setattr(frame_index_cache, "read_frame_index", counted)
    kept = str(tmp_path / "videos.npz")
    first = clips(root, frames=4, index=kept)
    assert sorted(read) == ["a.mp4", "b.mp4", "c.mkv", "short.mp4"]
    read.clear()
    second = clips(root, frames=4, index=kept)
    assert not read
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one["video"], other["video"])
        assert (one["label"], one["start"]) == (other["label"], other["start"])
    record(root / "jump" / "short.mp4", count=7)
    record(root / "run" / "new.mp4", count=4)
    third = clips(root, frames=4, index=kept)
    assert sorted(read) == ["new.mp4", "short.mp4"]
    assert len(third) == len(first) + 2
    assert sorted(os.listdir(tmp_path)) == ["data", "videos.npz"]
    for source in (first, second, third):
        source.close()


def test_a_remote_video_of_another_version_is_read_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(path: str, local: str, max_pixels: int) -> frame_index.FrameIndex:
        read.append(path)
        return frame_index.read_frame_index(path, local, max_pixels)

    monkeypatch.setattr(frame_index_cache, "read_frame_index", counted)
    data, options = (root / "run" / "a.mp4").read_bytes(), {"index": str(tmp_path / "videos.npz"), "frames": 4}
    files = fsspec.filesystem("memory")
    for _ in range(2):
        files.pipe("/videos/a.mp4", data)  # as large as before; only its time tells
        for _ in range(2):
            penstock.open("memory://videos/a.mp4", cache=tmp_path / "cache", **options).close()
    assert read == ["memory://videos/a.mp4"] * 2
    files.rm("/videos", recursive=True)


def test_true_is_no_path_of_an_index(root: Path) -> None:
    with pytest.raises(OptionError, match="index=True is not the path of a file"):
        clips(root, index=True, frames=4)


def test_what_is_no_index_is_not_used(root: Path, tmp_path: Path) -> None:
    clips(root, index=str(tmp_path / "good.npz"), frames=4)
    good = (tmp_path / "good.npz").read_bytes()
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "old.npz", version=np.int64(0))
    (tmp_path / "cut.npz").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.npz").write_text("text")
    for name in ("other", "cut", "text"):
        with pytest.raises(SourceError, match="no index of videos"):
            clips(root, index=str(tmp_path / f"{name}.npz"), frames=4)
    assert len(clips(root, index=str(tmp_path / "old.npz"), frames=4)) == 9
    with pytest.raises(SourceError, match="cannot be written"):
        clips(root, index=str(tmp_path / "nowhere" / "a.npz"), frames=4)


def growing(path: Path, shapes: list[tuple[int, int]]) -> Path:
    """Make a video whose frames change their size, ten of each."""
    with av.open(str(path), "w") as copy:
        target = None
        for number, shape in enumerate(shapes):
            part = record(path.with_name(f"part{number}.webm"), "libvpx", {"g": "5"}, count=10, shape=shape)
            with av.open(str(part)) as container:
                target = target or copy.add_stream_from_template(container.streams.video[0])
                for packet in container.demux(video=0):
                    if packet.dts is not None:
                        packet.pts, packet.dts = packet.pts + number * 400, packet.dts + number * 400
                        packet.stream = target
                        copy.mux(packet)
    return path


def test_frames_that_change_their_size_need_one_that_is_asked_for(tmp_path: Path) -> None:
    path = growing(tmp_path / "a.webm", [(48, 64), (96, 128)])
    source = clips(path, frames=4)
    assert [source[number]["video"].shape[2] for number in (0, 1, 3, 4)] == [48, 48, 96, 96]
    with pytest.raises(RecordError, match="pass size="):
        source[2]
    source.close()
    source = clips(path, frames=4, size=16)
    assert {sample["video"].shape for sample in source} == {(4, 3, 16, 16)}
    source.close()


def test_frames_that_grow_beyond_what_the_header_says_are_refused(tmp_path: Path) -> None:
    source = clips(growing(tmp_path / "a.webm", [(48, 64), (96, 128)]), frames=5, max_pixels=48 * 64)
    assert source[1]["video"].shape == (5, 3, 48, 64)
    with pytest.raises(RecordError, match="cannot be decoded"):
        source[2]
    source.close()


def test_a_file_without_video_is_an_error(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(RecordError, match="no video"):
        clips(tmp_path)


def test_remote_videos_are_read_from_copies(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    path = record(tmp_path / "a.mp4")
    whole, _ = decoded(path)
    memory = fsspec.filesystem("memory")
    memory.pipe("/videos/walk/a.mp4", path.read_bytes())
    try:
        source = penstock.open("memory://videos/", format="video", labels=True, frames=4, cache=tmp_path / "cache")
        np.testing.assert_array_equal(source[3]["video"], whole[12:16])
        source.close()
    finally:
        memory.rm("/videos", recursive=True)


def test_no_clips_at_all_and_numbers_that_cannot_be_are_errors(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mp4", count=5)
    with pytest.raises(SourceError, match="6 frames"):
        clips(path, frames=6)
    for options in ({"frames": 0}, {"stride": 0}, {"step": 0}, {"size": 0}, {"resize": "fit"}):
        with pytest.raises(OptionError):
            clips(path, **options)


@pytest.mark.parametrize("name", ["B-frames in MP4", "B-frames in MKV", "VP9", "AVI", "transport stream"])
def test_mutated_videos_give_clips_or_the_one_error(tmp_path: Path, name: str) -> None:
    file, codec, options = FILES[name]
    original = record(tmp_path / file, codec, options, count=20).read_bytes()
    path = tmp_path / f"mutated{Path(file).suffix}"
    chance = random.Random(name)
    for _ in range(40):
        data = bytearray(original)
        for _ in range(chance.randint(1, 5)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at : at + 4] = bytes(chance.randrange(256) for _ in range(4))
                case 2:
                    data[at:at] = bytes(data[at : at + 20])
                case _:
                    data = data[: at + 1]
        path.write_bytes(data)
        try:
            source = clips(path, frames=4, size=16, max_pixels=1 << 20)
        except SourceError:
            continue
        for number in range(min(len(source), 8)):
            with contextlib.suppress(RecordError):
                assert source[number]["video"].shape == (4, 3, 16, 16)
        source.close()
