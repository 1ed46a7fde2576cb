"""Folders of pictures."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from sample_files import assert_same

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.images.image_codec import encode
from penstock.data.formats.images.source import (
    ImageFolder,
    ImageFolderWriter,
    open_files,
    why_unsupported,
)
from penstock.data.schema import Field, Selection
from penstock.data.storage.storage import Storage

IMAGE = Field("array", "uint8", (3, None, None))
LABEL = Field("number", "int64")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (3, height, width), np.uint8)


def put(path: Path, seed: int = 0, shape: tuple[int, int] = (12, 16)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(noise(*shape, seed), "jpeg" if path.suffix.lower() in (".jpg", ".jpeg") else "png"))
    return path


def folder(path: Path | str | list[str], fields: object = None, **options: object) -> ImageFolder:
    paths = path if isinstance(path, list) else [str(path)]
    chosen = Selection.of(fields)  # type: ignore[arg-type]
    return open_files(paths, storage=Storage(), fields=chosen, errors="raise", **options)  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(["cats/2.jpg", "cats/10.png", "ants/a.JPEG", "dogs/deep/er/x.jpg", "dogs/b.jpg"]):
        put(tmp_path / "data" / name, number)
    return tmp_path / "data"


# ── which files there are ───────────────────────────────────────────────────────────────────────────────────


def test_class_folders_make_labels_in_the_order_of_their_names(root: Path) -> None:
    source = folder(root, ["path", "label"])
    found = [(os.path.relpath(sample["path"], root), sample["label"]) for sample in source]
    assert found == [
        ("ants/a.JPEG", 0),
        ("cats/10.png", 1),
        ("cats/2.jpg", 1),
        ("dogs/b.jpg", 2),
        ("dogs/deep/er/x.jpg", 2),
    ]
    assert source.classes == ("ants", "cats", "dogs")
    assert source.class_to_idx == {"ants": 0, "cats": 1, "dogs": 2}
    np.testing.assert_array_equal(source.labels, [0, 1, 1, 2, 2])


def test_what_is_no_picture_or_hidden_is_left_out(root: Path) -> None:
    (root / "cats" / "README.txt").write_text("no picture")
    put(root / "cats" / ".thumb.jpg")
    put(root / ".cache" / "c.jpg")
    (root / "cats" / "folder.jpg").mkdir()
    os.mkfifo(root / "cats" / "pipe.jpg")
    assert len(folder(root)) == 5
    assert folder(root).classes == ("ants", "cats", "dogs")


def test_a_class_without_pictures_keeps_its_label(root: Path) -> None:
    (root / "bees").mkdir()
    source = folder(root)
    assert source.classes == ("ants", "bees", "cats", "dogs")
    np.testing.assert_array_equal(source.labels, [0, 2, 2, 3, 3])


def test_links_are_followed_and_circles_are_not(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "elsewhere" / "e.jpg")
    (root / "eels").symlink_to(tmp_path / "elsewhere")
    (root / "dogs" / "round").symlink_to(root / "dogs")
    (root / "cats" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert len(folder(root)) == 6


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    for number in range(3):
        put(tmp_path / f"{2 - number}.png", number)
    source = folder(tmp_path)
    assert [sorted(sample) for sample in source] == [["image"]] * 3
    np.testing.assert_array_equal(source[0]["image"], noise(12, 16, 2))
    assert source.labels is None
    assert source.classes == ()


def test_class_folders_can_be_read_without_labels_and_flat_ones_not_with(root: Path, tmp_path: Path) -> None:
    put(root / "beside.png")
    source = folder(root, labels=False)
    assert len(source) == 6
    assert source.labels is None
    flat = put(tmp_path / "flat" / "a.png").parent
    with pytest.raises(SourceError, match="class folders"):
        folder(flat, labels=True)
    with pytest.raises(OptionError, match="labels"):
        folder([str(flat / "a.png")], labels=True)
    with pytest.raises(SourceError, match="label"):
        folder(flat, ["label"])


def test_a_list_of_files_keeps_its_order(tmp_path: Path) -> None:
    paths = [str(put(tmp_path / name, number)) for number, name in enumerate(["b.png", "a.png", "c.dat"])]
    source = folder(paths)
    for number in range(3):
        np.testing.assert_array_equal(source[number]["image"], noise(12, 16, number))


def test_several_folders_are_one_with_the_classes_of_all(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "more" / "bees" / "b.jpg")
    put(tmp_path / "more" / "cats" / "c.jpg")
    source = folder([str(root), str(tmp_path / "more")], ["path", "label"])
    assert source.classes == ("ants", "bees", "cats", "dogs")
    for sample in source:
        parts = sample["path"].split(os.sep)
        assert source.classes[sample["label"]] in parts
    assert len(source) == 7
    with pytest.raises(SourceError, match="either"):
        folder([str(root), str(root / "cats" / "2.jpg")])


def test_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no file"):
        folder(tmp_path)
    with pytest.raises(SourceError, match="no file"):
        folder(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_listed_is_an_error_with_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match="data cannot be listed: Permission denied"):
        folder(root)


def test_a_folder_in_memory_of_fsspec_is_read(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    try:
        for number, name in enumerate(["cats/a.png", "ants/b.png"]):
            memory.pipe(f"/pictures/{name}", encode(noise(5, 6, number)))
        source = folder("memory://pictures")
        assert source.classes == ("ants", "cats")
        np.testing.assert_array_equal(source[0]["image"], noise(5, 6, 1))
        with pytest.raises(RecordError, match="larger than 10 bytes"):
            folder("memory://pictures", max_record_nbytes=10)[0]
    finally:
        memory.rm("/pictures", recursive=True)


# ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_fields_are_what_was_asked_for(root: Path) -> None:
    source = folder(root, {"x": "image", "y": "label", "file": "path", "raw": "encoded"}, size=8)
    sample = source[0]
    assert sample["x"].shape == (3, 8, 8)
    assert sample["raw"] == Path(sample["file"]).read_bytes()
    assert {name: field.words() for name, field in source.schema.items()} == {
        "x": "uint8[3, 8, 8]",
        "y": "int64",
        "file": "text",
        "raw": "bytes",
    }
    assert sorted(folder(root)[0]) == ["image", "label"]
    assert folder(root).schema["image"].words() == "uint8[3, ?, ?]"
    with pytest.raises(SourceError, match="colour"):
        folder(root, ["colour"])


def test_labels_are_read_without_opening_a_file(root: Path) -> None:
    source = folder(root, {"x": "image", "y": "label"})
    (root / "ants" / "a.JPEG").unlink()
    assert source.select_fields(["y"])[0] == {"y": 0}
    assert len(source.filter(lambda sample: sample["y"] == 1, fields=["y"])) == 2
    assert sorted(source[1]) == ["x", "y"]


def test_a_broken_picture_is_an_error_with_its_path_and_others_are_read(root: Path) -> None:
    (root / "cats" / "0.jpg").write_bytes(b"")
    (root / "cats" / "1.jpg").write_bytes((root / "cats" / "2.jpg").read_bytes()[:300])
    source = folder(root)
    for number, name in ((1, "0.jpg"), (2, "1.jpg")):
        with pytest.raises(RecordError, match=name) as caught:
            source[number]
        assert caught.value.key == number
    assert source[4]["label"] == 1
    with pytest.raises(RecordError, match="max_record_nbytes"):
        folder(root, max_record_nbytes=10)[0]
    with pytest.raises(RecordError, match="max_pixels"):
        folder(root, max_pixels=10)[0]
    os.unlink(root / "cats" / "10.png")
    with pytest.raises(RecordError, match="cannot be read"):
        source[3]


def test_a_png_with_a_jpegs_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(encode(noise(5, 6)))
    np.testing.assert_array_equal(folder(tmp_path)[0]["image"], noise(5, 6))


def test_options_that_cannot_be_are_refused(root: Path) -> None:
    with pytest.raises(OptionError, match="resize"):
        folder(root, resize="fit")
    with pytest.raises(OptionError, match="size"):
        folder(root, size=0)
    with pytest.raises(OptionError, match="colour"):
        penstock.open(root, format="images", colour="grey")


def test_a_pickled_folder_is_small_and_the_same(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"{number:04d}.jpg").touch()
    put(tmp_path / "0007.jpg")
    source = folder(tmp_path)
    data = pickle.dumps(source)
    assert len(data) < 2000 * 24
    np.testing.assert_array_equal(pickle.loads(data)[7]["image"], source[7]["image"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_make_batches_of_it(root: Path, num_workers: int) -> None:
    source = penstock.open(root, size=8)
    expected = [sample["image"] for sample in source]
    loader = penstock.DataLoader(source, batch_size=5, num_workers=num_workers)
    (batch,) = [{name: value.clone() for name, value in batch.items()} for batch in loader]
    (other,) = torch.utils.data.DataLoader(source, batch_size=5, num_workers=num_workers)
    for one in (batch, other):
        assert one["label"].tolist() == [0, 1, 1, 2, 2]
        np.testing.assert_array_equal(one["image"].numpy(), np.stack(expected))


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────

PICTURES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99)).map(lambda numbers: noise(*numbers))
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(images=st.lists(PICTURES, min_size=1, max_size=6), format=st.sampled_from(["png", "webp"]))
def test_pictures_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, images: list[np.ndarray], format: str
) -> None:
    path = tmp_path_factory.mktemp("written")
    writer = ImageFolderWriter(str(path), {"image": IMAGE}, format=format)
    for image in images:
        writer.write({"image": image})
    writer.close()
    source = folder(path)
    assert len(source) == len(images)
    for image, sample in zip(images, source, strict=True):
        assert_same({"image": image}, sample)


@QUICK
@given(labels=st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_labels_come_back(tmp_path_factory: pytest.TempPathFactory, labels: list[int]) -> None:
    path = tmp_path_factory.mktemp("written")
    writer = ImageFolderWriter(str(path), {"encoded": Field("bytes"), "label": LABEL})
    for label in labels:
        writer.write({"encoded": encode(np.full((3, 2, 2), label, np.uint8)), "label": label})
    writer.close()
    source = folder(path)
    assert [int(sample["label"]) for sample in source] == sorted(labels)
    assert all((sample["image"] == sample["label"]).all() for sample in source)


def test_class_folders_are_made_up_to_the_highest_label(tmp_path: Path) -> None:
    writer = ImageFolderWriter(str(tmp_path / "out"), {"image": IMAGE, "label": LABEL})
    writer.write({"image": torch.from_numpy(noise(4, 5)), "label": 1})
    for label in (-1, 100_000):
        with pytest.raises(SourceError, match="range"):
            writer.write({"image": noise(4, 5), "label": label})
    writer.close()
    source = folder(tmp_path / "out")
    assert source.classes == ("00000", "00001")
    assert source[0]["label"] == 1


def test_torchvisions_way_of_reading_gives_the_same(tmp_path: Path) -> None:
    writer = ImageFolderWriter(str(tmp_path / "out"), {"image": IMAGE, "label": LABEL})
    for number in range(4):
        writer.write({"image": noise(4, 5, number), "label": number % 2})
    writer.close()
    found = []
    for label, name in enumerate(sorted(entry.name for entry in os.scandir(tmp_path / "out"))):
        for file in sorted(os.listdir(tmp_path / "out" / name)):
            with Image.open(tmp_path / "out" / name / file) as picture:
                found.append((np.asarray(picture.convert("RGB")).transpose(2, 0, 1), label))
    for (image, label), sample in zip(found, folder(tmp_path / "out"), strict=True):
        np.testing.assert_array_equal(image, sample["image"])
        assert label == sample["label"]


def test_what_would_not_come_back_is_said() -> None:
    assert why_unsupported({"image": IMAGE}) == why_unsupported({"encoded": Field("bytes"), "label": LABEL}) == ""
    for schema in (
        {"x": IMAGE},
        {"image": IMAGE, "name": Field("text")},
        {"image": Field("array", "float32", (3, 4, 4))},
        {"image": Field("array", "uint8", (4, 4, 3))},
        {"image": Field("array", "uint8", (3, 0, 3))},
        {"image": Field("array", "uint8", (4, 4))},
        {"encoded": Field("text")},
        {"image": IMAGE, "label": Field("number", "float32")},
        {"image": IMAGE, "label": Field("number", "int32")},
        {"image": IMAGE, "encoded": Field("bytes")},
        {"label": LABEL},
    ):
        assert why_unsupported(schema), schema


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="float32"):
        ImageFolderWriter(str(tmp_path / "a"), {"image": Field("array", "float32", (3, 4, 4))})
    writer = ImageFolderWriter(str(tmp_path / "b"), {"encoded": Field("bytes"), "label": Field("number", "int32")})
    with pytest.raises(SourceError, match="no encoded image"):
        writer.write({"encoded": b"text", "label": 0})
    with pytest.raises(SourceError, match="label"):
        writer.write({"encoded": encode(noise(2, 2)), "label": -1})
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "there.txt").touch()
    with pytest.raises(SourceError, match="not empty"):
        ImageFolderWriter(str(tmp_path / "c"), {"image": IMAGE})
    with pytest.raises(OptionError, match="format"):
        ImageFolderWriter(str(tmp_path / "d"), {"image": IMAGE}, format="bmp").write({"image": noise(2, 2)})
