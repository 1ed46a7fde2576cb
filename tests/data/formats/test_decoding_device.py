"""Images and videos that are decoded on a GPU, here with stand-ins for the libraries that do it.

No GPU has run this: what is shown is what the libraries are asked for, in which order, and what becomes of the answer.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_images import put
from test_video import FILES, record
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.core.errors import ExtraError, OptionError, RecordError
from penstock.data.formats.decoding_device import decoding_device
from penstock.data.formats.images.device_images import decode_images, resized_on_device
from penstock.data.formats.images.image_codec import decode, encode, resized
from penstock.data.formats.video.device_decoder import DeviceVideoDecoder

HOST = torch.device("cpu")


class FakeTorchvision(ModuleType):
    """`torchvision.io` with one function, which decodes on the host whatever device it is asked for."""

    ImageReadMode = SimpleNamespace(RGB="RGB")

    def __init__(self) -> None:
        super().__init__("torchvision.io")
        self.calls: list[Any] = []
        self.refused: bytes = b""

    def decode_jpeg(self, data: list[torch.Tensor], mode: str, device: torch.device) -> list[torch.Tensor]:
        self.calls.append(len(data))
        assert mode == "RGB"
        encoded = [one.numpy().tobytes() for one in data]
        if self.refused in encoded:
            raise RuntimeError("nvjpegDecode failed")
        return [torch.from_numpy(decode(one).copy()) for one in encoded]


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> FakeTorchvision:
    made = FakeTorchvision()
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.io", made)
    return made


class FakeVideoDecoder:
    """torchcodec's class, by PyAV: frames by the time at which they are shown."""

    rotation: float | None = None
    late_s = 0.0

    def __init__(self, path: str, device: str) -> None:
        import av

        assert device == "cpu"
        with av.open(path) as container:
            frames = list(container.decode(video=0))
        self.times = np.array([float(frame.time) for frame in frames])
        order = np.argsort(self.times)
        self.times = self.times[order]
        self.pixels = np.stack([frames[number].to_ndarray(format="rgb24") for number in order]).transpose(0, 3, 1, 2)
        self.metadata = SimpleNamespace(height=self.pixels.shape[2], width=self.pixels.shape[3], rotation=self.rotation)

    def get_frames_played_at(self, seconds: list[float]) -> Any:
        shown = np.searchsorted(self.times, seconds, side="right") - 1
        times = torch.from_numpy(self.times[shown] + self.late_s)
        return SimpleNamespace(data=torch.from_numpy(self.pixels[shown]), pts_seconds=times)


@pytest.fixture
def torchcodec(monkeypatch: pytest.MonkeyPatch) -> type[FakeVideoDecoder]:
    module = ModuleType("torchcodec.decoders")
    made = type("VideoDecoder", (FakeVideoDecoder,), {})
    module.VideoDecoder = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    return made


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host take the place of the GPU that a source asks for."""
    for kind in ("images", "video"):
        place = f"penstock.data.formats.{kind}.source.decoding_device"
        monkeypatch.setattr(place, lambda device, module: None if device == "cpu" else HOST)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(["a/0.jpg", "a/1.png", "a/2.jpg", "b/3.jpeg", "b/4.jpg", "b/5.jpg"]):
        put(tmp_path / "images" / name, number, (12 + number, 16))
    return tmp_path / "images"


Opened = Callable[..., Any]


# ── images ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
def test_a_batch_of_jpegs_is_decoded_by_one_call(root: Path, torchvision: FakeTorchvision, loader: Opened) -> None:
    source = penstock.open(root, size=10, device="cuda")
    batches = list(loader(source, batch_size=3))
    assert torchvision.calls == [2, 3]  # the PNG is decoded on the host
    host = list(loader(penstock.open(root, size=10), batch_size=3))
    for batch, expected in zip(batches, host, strict=True):
        assert batch["label"].equal(expected["label"])
        assert (batch["image"].int() - expected["image"].int()).abs().max() <= 2  # resized in float32 there


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("options", [{"seed": 1}, {"errors": "skip"}, {"device": "sim"}, {"shuffle": True}])
def test_a_loader_with_options_has_the_same_samples(
    root: Path, torchvision: FakeTorchvision, options: dict[str, Any]
) -> None:
    source = penstock.open(root, size=8, device="cuda")
    loader = penstock.DataLoader(source, batch_size=2, **options)
    images = torch.cat([batch["image"].cpu() for batch in loader])
    assert sorted(images.sum((1, 2, 3)).tolist()) == sorted(int(source[number]["image"].sum()) for number in range(6))
    assert max(torchvision.calls) == 2


@pytest.mark.usefixtures("on_host")
def test_a_pass_over_decoded_images_resumes(root: Path, torchvision: FakeTorchvision) -> None:
    def made() -> Any:
        return penstock.DataLoader(penstock.open(root, size=8, device="cuda"), batch_size=1, shuffle=True)

    torch.manual_seed(0)
    loader = made()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state, rest = loader.state_dict(), [batch["image"] for batch in iterator]
    again = made()
    again.load_state_dict(state)
    assert all(map(torch.equal, rest, [batch["image"] for batch in again]))
    assert len(rest) == 4


@pytest.mark.usefixtures("on_host")
def test_a_jpeg_that_the_decoder_refuses_is_decoded_on_the_host_and_the_others_are_not(
    root: Path, torchvision: FakeTorchvision
) -> None:
    torchvision.refused = (root / "b" / "4.jpg").read_bytes()
    source = penstock.open(root, device="cuda")
    images = [sample["image"] for sample in source.__getitems__([3, 4, 5])]
    assert torchvision.calls == [3, 1, 1, 1]
    assert all(np.array_equal(image, source[number]["image"]) for number, image in zip((3, 4, 5), images, strict=True))


@pytest.mark.usefixtures("on_host", "torchvision")
def test_a_broken_image_is_named_and_the_others_come(root: Path) -> None:
    whole = (root / "b" / "4.jpg").read_bytes()
    (root / "b" / "4.jpg").write_bytes(whole[: len(whole) // 2])
    source = penstock.open(root, size=8, device="cuda")
    with pytest.raises(RecordError, match=r"b/4\.jpg"):
        list(TorchDataLoader(source, batch_size=3))
    loader = penstock.DataLoader(source, batch_size=3, errors="skip")
    assert sum(len(batch["image"]) for batch in loader) == 5


@pytest.mark.usefixtures("on_host")
def test_remote_images_of_a_batch_are_fetched_and_decoded_together(root: Path, torchvision: FakeTorchvision) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.put(f"{root}/", "/decoded/", recursive=True)
    try:
        source = penstock.open("memory://decoded", size=8, device="cuda")
        (batch,) = TorchDataLoader(source, batch_size=6)
        source.close()
    finally:
        memory.rm("/decoded", recursive=True)
    here = penstock.open(root, size=8, device="cuda")
    assert batch["image"].equal(torch.stack([here[number]["image"] for number in range(6)]))
    assert torchvision.calls[0] == 5


@pytest.mark.usefixtures("on_host", "torchvision")
def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(
    root: Path, torchvision: FakeTorchvision
) -> None:
    source = penstock.open(root, device="cuda", max_pixels=100)
    with pytest.raises(RecordError, match="max_pixels"):
        source[0]
    assert not torchvision.calls


def test_the_current_stream_is_waited_for_before_images_are_decoded_into_memory_of_its_own(
    torchvision: FakeTorchvision, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(synchronize=lambda: torchvision.calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: torchvision.calls.append("wait for all"))
    jpegs = [encode(np.full((3, 8, 8), number, np.uint8), "jpeg") for number in range(2)]
    decode_images(jpegs, torch.device("cuda"), None, "cover", 100)
    assert torchvision.calls == ["wait", 2]
    # What the decoder was writing when it failed is over before its memory is used again.
    torchvision.calls.clear()
    refusals = itertools.chain([True], itertools.repeat(False))
    whole = torchvision.decode_jpeg

    def failing(data: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        found = whole(data, **options)
        if next(refusals):
            raise RuntimeError("nvjpegDecode failed")
        return found

    monkeypatch.setattr(torchvision, "decode_jpeg", failing)
    decode_images(jpegs, torch.device("cuda"), None, "cover", 100)
    assert torchvision.calls == ["wait", 2, "wait for all", 1, 1]


@pytest.mark.parametrize("mode", ["cover", "stretch"])
@pytest.mark.parametrize("size", [(9, 9), (40, 20), (12, 30), None])
def test_images_are_resized_as_on_the_host(mode: Any, size: tuple[int, int] | None) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (31, 22, 3), np.uint8)
    expected = resized(pixels, (0, 0, 31, 22), size, mode)
    found = resized_on_device(torch.from_numpy(pixels.transpose(2, 0, 1).copy()), size, mode)
    assert found.shape == expected.shape
    assert np.abs(found.numpy().astype(int) - expected).max() <= 1


# ── where ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("on_host", "torchvision", "preloaded_python")
@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
def test_no_worker_decodes_on_a_gpu(root: Path, options: dict[str, Any]) -> None:
    source = penstock.open(root, size=8, device="cuda")
    with pytest.raises(OptionError, match="num_workers=0"):
        penstock.DataLoader(source, **options)
    hidden = [source]  # in a dataset of the user's own, where it is not seen before

    class Own(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return hidden[0][index]

    with pytest.raises(OptionError, match="num_workers=0"):
        list(penstock.DataLoader(Own(), **options))


@pytest.mark.usefixtures("on_host", "torchvision")
def test_samples_on_a_gpu_are_not_cached(root: Path) -> None:
    source = penstock.open(root, size=8, device="cuda")
    for after in ("decode", "map"):
        with pytest.raises(OptionError, match="host"):
            source.map(lambda sample: sample).cached("ram", after=after)
    assert source.select_fields(["label"]).decodes_on is None
    assert pickle.loads(pickle.dumps(source))[0]["image"].equal(source[0]["image"])


def test_a_gpu_that_is_not_there_is_refused_and_so_is_what_is_no_gpu(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, why in (("cuda", "needs a GPU"), ("meta", "'cpu' or on 'cuda'"), ("nowhere", "no device of torch")):
        with pytest.raises(OptionError, match=why):
            penstock.open(root, device=device)
    assert isinstance(penstock.open(root, device="cpu")[0]["image"], np.ndarray)


@pytest.mark.parametrize("module", ["torchvision.io", "torchcodec.decoders"])
def test_a_library_that_is_missing_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExtraError, match=f"{module.partition('.')[0]} is needed"):
        decoding_device("cuda", module)


# ── videos ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("on_host", "torchcodec")
@pytest.mark.parametrize("kind", ["B-frames in MP4", "VP9", "AVI"])
def test_clips_have_the_frames_that_the_host_decodes(tmp_path: Path, kind: str) -> None:
    name, codec, options = FILES[kind]
    record(tmp_path / name, codec, options, count=30)
    source = penstock.open(tmp_path, frames=4, stride=2, step=5, size=24, device="cuda")
    host = penstock.open(tmp_path, frames=4, stride=2, step=5, size=24)
    for number in (4, 0, 2, 3):
        assert source[number]["start"] == host[number]["start"]
        found, expected = source[number]["video"], torch.from_numpy(host[number]["video"])
        assert (found.int() - expected.int()).abs().max() <= 2
    assert penstock.open(tmp_path, frames=4, device="cuda")[0]["video"].shape == (4, 3, 48, 64)


@pytest.fixture
def film(tmp_path: Path) -> Path:
    return record(tmp_path / "a.mp4", count=12)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("changed", "options", "why"),
    [
        ({"late_s": 0.04}, {}, "finds frames at"),
        ({"rotation": 90.0}, {}, "rotation"),
        ({}, {"size": 4, "max_record_nbytes": 1000}, "max_record_nbytes"),
    ],
)
def test_a_clip_that_torchcodec_would_give_otherwise_is_refused_by_name(
    film: Path, torchcodec: type, changed: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    for name, value in changed.items():
        setattr(torchcodec, name, value)
    with pytest.raises(RecordError, match=rf"a\.mp4.*{why}"):
        penstock.open(film, frames=4, device="cuda", **options)[0]


@pytest.mark.usefixtures("on_host", "torchcodec")
def test_a_video_without_times_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "a.avi", "mpeg4", {"g": "12", "bf": "2"}, count=12)
    with pytest.raises(RecordError, match="no usable times"):
        penstock.open(tmp_path, frames=4, device="cuda")[0]


@pytest.mark.usefixtures("on_host", "torchcodec", "film")
def test_the_stream_is_waited_for_before_a_clip_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("penstock.data.formats.video.source.begin_on", lambda device: order.append("wait"))
    frames = DeviceVideoDecoder.frames
    monkeypatch.setattr(DeviceVideoDecoder, "frames", lambda *given: (order.append("decode"), frames(*given))[1])
    source = penstock.open(tmp_path, frames=4, device="cuda")
    assert len([source[number] for number in range(2)]) == 2
    assert order == ["wait", "decode"] * 2
