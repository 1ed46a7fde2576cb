"""What people's folders hold: the right samples, or an error or a warning that says what to pass."""

from __future__ import annotations

import csv
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.core.errors import OptionError, SourceError
from penstock.data.inspect import inspect
from penstock.data.inspect.inspection import render


def picture(path: Path, value: int = 0, mode: str = "RGB", size: tuple[int, int] = (8, 6)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == "I;16":
        pixels = np.full(size[::-1], value, np.uint16)
    else:
        pixels = np.full((*size[::-1], 3) if mode == "RGB" else size[::-1], value, np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def table(path: Path, rows: list[list[Any]], delimiter: str = ",") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)


def text(path: Path, words: str = "words") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(words)


def wav(path: Path, count: int = 100) -> None:
    soundfile = pytest.importorskip("soundfile")
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.zeros(count, np.float32), 8000)


# ── layouts of well-known data sets, which no rule of folders reads right ───────────────────────────────────


def coco(root: Path) -> None:
    annotations = [
        {"id": 7, "image_id": 1, "bbox": [1, 2, 3, 4], "category_id": 18, "iscrowd": 0, "segmentation": [[1, 2, 3]]},
        {"id": 8, "image_id": 1, "bbox": [0, 0, 2, 2], "category_id": 44, "iscrowd": 1, "segmentation": [[4, 5, 6]]},
    ]
    images = [{"id": number, "file_name": f"{number:012d}.jpg"} for number in (0, 1)]
    for number in (0, 1):
        picture(root / "train2017" / f"{number:012d}.jpg", number)
        picture(root / "val2017" / f"{number:012d}.jpg", 9)
    categories = [{"id": 18, "name": "dog"}, {"id": 44, "name": "bottle"}]
    text(
        root / "annotations" / "instances_train2017.json",
        json.dumps({"images": images, "annotations": annotations, "categories": categories}),
    )


def voc(root: Path) -> None:
    for number in range(3):
        picture(root / "JPEGImages" / f"{number}.jpg", number)
        text(root / "Annotations" / f"{number}.xml")
    picture(root / "SegmentationClass" / "1.png", 15, "L")
    text(root / "ImageSets" / "Segmentation" / "train.txt", "1\n")


def yolo(root: Path) -> None:
    for split in ("train", "val"):
        picture(root / "images" / split / "1.jpg")
        text(root / "labels" / split / "1.txt", "0 0.5 0.5 1 1\n")
    text(root / "data.yaml")


def kaggle(root: Path) -> None:
    for number in range(4):
        picture(root / "train" / f"{number}.jpg", number)
        picture(root / "test" / f"{number}.jpg", 99)
    table(root / "train.csv", [["id", "label"], *([number, number % 2] for number in range(4))])
    table(root / "sample_submission.csv", [["id", "label"], [0, 0]])


def ljspeech(root: Path) -> None:
    for number in (1, 2):
        wav(root / "wavs" / f"LJ001-000{number}.wav", 100 * number)
    text(root / "metadata.csv", 'LJ001-0001|Printing, in "the|Printing\nLJ001-0002|only sense|only sense\n')
    text(root / "README")


def common_voice(root: Path) -> None:
    for number in range(3):
        wav(root / "clips" / f"common_voice_en_{number}.wav", 100)
    rows = [["client_id", "path", "sentence"], *(["a", f"common_voice_en_{number}.wav", "it's"] for number in range(2))]
    table(root / "train.tsv", rows, "\t")
    table(root / "other.tsv", [rows[0], rows[1]], "\t")


def librispeech(root: Path) -> None:
    for speaker in ("61", "121"):
        for number in range(2):
            wav(root / "test-clean" / speaker / "70968" / f"{speaker}-70968-000{number}.wav")
        text(root / "test-clean" / speaker / "70968" / f"{speaker}-70968.trans.txt")


def celeba(root: Path) -> None:
    for number in range(3):
        picture(root / "img_align_celeba" / f"{number:06d}.jpg", number)
    table(root / "list_attr_celeba.csv", [["image_id", "Smiling"], *([f"{n:06d}.jpg", -1] for n in range(3))])


def image_folder(root: Path) -> None:
    for number in range(3):
        picture(root / "train" / f"{number}.png", number)
    text(
        root / "train" / "metadata.jsonl",
        "".join(f'{{"file_name": "{n}.png", "caption": "number {n}"}}\n' for n in range(3)),
    )


def masks(root: Path) -> None:
    for number in range(3):
        picture(root / "images" / f"{number}.jpg", number)
        picture(root / "masks" / f"{number}.png", 300 + number, "I;16")


def cityscapes(root: Path) -> None:
    for split in ("train", "val"):
        picture(root / "leftImg8bit" / split / "aachen" / "a_0_leftImg8bit.png")
        picture(root / "gtFine" / split / "aachen" / "a_0_gtFine_labelIds.png", 3, "L")


def captions(root: Path) -> None:
    picture(root / "1.png")
    text(root / "1.txt", "a photo")


def splits(root: Path) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            picture(root / split / name / "1.jpg")


def one_split(root: Path) -> None:
    for name in ("cat", "dog"):
        picture(root / "train" / name / "1.jpg")


def imagenet(root: Path) -> None:
    picture(root / "Data" / "CLS-LOC" / "train" / "n01440764" / "n01440764_1.JPEG")
    picture(root / "Data" / "CLS-LOC" / "val" / "ILSVRC2012_val_1.JPEG")
    text(root / "Annotations" / "CLS-LOC" / "val" / "ILSVRC2012_val_1.xml")


def beside(root: Path) -> None:
    picture(root / "cat" / "1.jpg")
    picture(root / "dog" / "1.jpg")
    picture(root / "preview.jpg")


def two_media(root: Path) -> None:
    for name in ("cat", "dog"):
        picture(root / name / "1.jpg")
        picture(root / name / "2.jpg")
    wav(root / "dog" / "1.wav")


def crowd(root: Path) -> None:
    for part in ("part_A", "part_B"):
        picture(root / part / "images" / "1.jpg")
        text(root / part / "ground_truth" / "GT_1.mat")


_UNCLEAR = {
    coco: r"annotations/instances_train2017.json may say more.*train2017/ \(2 of .jpg\)",
    voc: "Annotations/0.xml may say more",
    yolo: "data.yaml may say more",
    kaggle: "sample_submission.csv may say more",
    ljspeech: "metadata.csv may say more",
    common_voice: r"other.tsv may say more.*clips/ \(3 of .wav\), other.tsv, train.tsv",
    librispeech: "trans.txt may say more",
    celeba: "list_attr_celeba.csv may say more",
    image_folder: "train/metadata.jsonl may say more",
    masks: "'images' does not look like a class",
    cityscapes: r"several splits: train \(gtFine/train\), validation \(gtFine/val\)",
    captions: "1.txt may say more",
    splits: r"several splits: train \(train\), validation \(val\)",
    one_split: "'train' is a split",
    imagenet: "ILSVRC2012_val_1.xml may say more",
    beside: "some files are in folders, and some are not",
    two_media: "dog/1.wav may say more",
    crowd: "GT_1.mat may say more",
}


@pytest.mark.parametrize("make", _UNCLEAR, ids=lambda make: make.__name__)
def test_a_folder_that_may_be_something_else_is_refused_with_what_it_holds(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path)
    with pytest.raises(SourceError, match=_UNCLEAR[make]) as caught:
        penstock.open(tmp_path)
    assert "labels=True" in str(caught.value)
    assert "media=" in str(caught.value)
    assert "masks=" in str(caught.value)
    with pytest.raises(SourceError, match=_UNCLEAR[make]):
        inspect(tmp_path)


@pytest.mark.parametrize("make", [splits, one_split, beside, kaggle, masks], ids=lambda make: make.__name__)
def test_labels_says_whether_folders_are_classes(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    assert "label" in penstock.open(tmp_path, labels=True)[0]
    assert sorted(penstock.open(tmp_path, labels=False)[0]) == ["image"]


def test_what_labels_leaves_out_is_said_by_an_inspection(tmp_path: Path) -> None:
    kaggle(tmp_path)
    found = inspect(tmp_path, options={"labels": True})
    assert found.notes == [
        "labels: 2 class folders: test, train",
        "left out, as labels= was given: sample_submission.csv, train.csv",
    ]
    assert found.notes[0] in render(found)
    assert found.to_json()["notes"] == found.notes


def test_one_folder_makes_no_labels_and_is_warned_of(tmp_path: Path) -> None:
    picture(tmp_path / "img_align_celeba" / "1.jpg")
    with pytest.warns(
        UserWarning, match="all files of .* are in one folder, img_align_celeba/, and penstock makes no labels; "
    ):
        assert sorted(penstock.open(tmp_path)[0]) == ["image"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert penstock.open(tmp_path, labels=True)[0]["label"] == 0
    assert "no labels" in inspect(tmp_path).notes[0]


def test_two_folders_with_the_same_names_of_files_are_classes_with_a_warning(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(2):
            picture(tmp_path / name / f"{number}.png")
    with pytest.warns(UserWarning, match="folders a and b of .* have files with the same names, .*masks="):
        assert penstock.open(tmp_path).labels.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]
    picture(tmp_path / "b" / "2.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert penstock.open(tmp_path).classes == ("a", "b")  # type: ignore[union-attr]


# ── a table that names the files ────────────────────────────────────────────────────────────────────────────


def test_a_table_beside_images_makes_samples_of_its_rows(tmp_path: Path) -> None:
    kaggle(tmp_path)
    source = penstock.open(tmp_path / "train", media=tmp_path / "train.csv", column="id", size=4)
    assert len(source) == 4
    assert sorted(source.schema) == ["id", "image", "label"]
    assert source.schema["label"].words() == "int64"
    for number, sample in enumerate(source):
        assert (sample["id"], sample["label"], sample["image"].shape) == (number, number % 2, (3, 4, 4))
        assert abs(int(sample["image"][0, 0, 0]) - number) <= 2
    chosen = penstock.open(tmp_path / "train", media=tmp_path / "train.csv", column="id", fields={"y": "label"})
    assert chosen[1] == {"y": 1}
    found = inspect(tmp_path / "train", options={"media": tmp_path / "train.csv", "column": "id"})
    assert "of which 'id' names the file" in found.notes[0]


def test_the_only_column_that_names_files_is_found(tmp_path: Path) -> None:
    celeba(tmp_path)
    source = penstock.open(tmp_path / "img_align_celeba", media=tmp_path / "list_attr_celeba.csv")
    assert source[2]["image_id"] == "000002.jpg"
    assert source[2]["Smiling"] == -1
    kaggle(tmp_path / "both")
    with pytest.raises(SourceError, match=r"which column .* names the files .*'id', 'label' all do; pass column="):
        penstock.open(tmp_path / "both" / "train", media=tmp_path / "both" / "train.csv")


def test_metadata_of_an_image_folder_is_found_beside_the_images(tmp_path: Path) -> None:
    image_folder(tmp_path)
    source = penstock.open(tmp_path / "train", media="metadata.jsonl")
    assert [sample["caption"] for sample in source] == ["number 0", "number 1", "number 2"]


def test_ids_without_a_suffix_name_recordings(tmp_path: Path) -> None:
    ljspeech(tmp_path)
    rows = penstock.open(tmp_path / "metadata.csv", header=["id", "text", "norm"], quoting=False)
    source = penstock.open(tmp_path / "wavs", media=rows, column="id")
    assert [(one["text"], one["audio"].shape) for one in source] == [
        ('Printing, in "the', (1, 100)),
        ("only sense", (1, 200)),
    ]


def test_recordings_that_no_row_names_are_left_out_with_a_warning(tmp_path: Path) -> None:
    common_voice(tmp_path)
    with pytest.warns(UserWarning, match="left out: 1 of the 3 files of .*clips, which no row of .*train.tsv names"):
        source = penstock.open(tmp_path / "clips", media=tmp_path / "train.tsv", column="path", frames=50)
    assert len(source) == 4
    assert [sample["sentence"] for sample in source] == ["it's"] * 4
    assert [sample["start"] for sample in source] == [0.0, 50 / 8000] * 2


def test_cocos_annotations_become_boxes_and_labels(tmp_path: Path) -> None:
    coco(tmp_path)
    source = penstock.open(tmp_path / "train2017", media=tmp_path / "annotations" / "instances_train2017.json")
    first, second = source[0], source[1]
    assert first["boxes"].shape == (0, 4)
    assert second["boxes"].dtype == np.float32
    assert second["boxes"].tolist() == [[1, 2, 4, 6], [0, 0, 2, 2]]
    assert second["labels"].tolist() == [18, 44]
    assert second["iscrowd"].tolist() == [0, 1]
    assert second["segmentation"] == [[[1, 2, 3]], [[4, 5, 6]]]
    assert second["image_id"] == 1


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"file": "a.png", "y": 1}, {"file": "gone.png", "y": 0}], "1 of the 2 rows .*names no file.*'gone.png'"),
        ([{"file": "a.jpg"}], "names no file"),
        ([{"file": "b.png"}], "names several files"),
        ([{"file": "other/a.png"}], "names no file"),
        ([{"file": "a.png"}, {"name": "a.png"}], r"row 1 .* has the fields \['name'\]"),
        ([], "has no rows"),
        (
            [{"image": 1, "file": f"{name}.png"} for name in ("x/a", "x/b", "y/b")],
            "has a column 'image', and so is a field",
        ),
        ([{"path": "a.png"}], "has no column 'file'"),
    ],
)
def test_rows_that_name_no_one_file_are_refused(tmp_path: Path, rows: list[dict[str, Any]], why: str) -> None:
    for name in ("x/a.png", "x/b.png", "y/b.png"):
        picture(tmp_path / name)
    with pytest.raises(SourceError, match=why):
        penstock.open(tmp_path, media=rows, column="file")


def test_a_table_makes_no_labels_of_folders_and_needs_a_format_of_folders(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a.png")
    with pytest.raises(OptionError, match="labels=True"):
        penstock.open(tmp_path / "images", media=[{"image": "a.png"}], column="image", labels=True)
    with pytest.raises(OptionError, match="pass media="):
        penstock.open(tmp_path / "images", column="image")
    table(tmp_path / "t.csv", [["a"], [1]])
    with pytest.raises(OptionError, match="csv has no option media="):
        penstock.open(tmp_path / "t.csv", media=[{"a": 1}])


def test_a_source_with_a_table_can_be_pickled_and_is_the_same(tmp_path: Path) -> None:
    kaggle(tmp_path)
    source = penstock.open(tmp_path / "train", media=tmp_path / "train.csv", column="id")
    other = pickle.loads(pickle.dumps(source))
    assert [sample["label"] for sample in other] == [0, 1, 0, 1]


# ── masks ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_masks_are_read_as_they_are_beside_their_images(tmp_path: Path) -> None:
    masks(tmp_path)
    source = penstock.open(tmp_path / "images", masks=str(tmp_path / "masks"))
    assert sorted(source[0]) == ["image", "mask"]
    assert source.schema["mask"].words() == "uint16[?, ?]"
    for number, sample in enumerate(source):
        assert sample["mask"].shape == (6, 8)
        assert (sample["mask"] == 300 + number).all()


@pytest.mark.parametrize("resize", ["cover", "stretch"])
def test_a_mask_is_cut_as_its_image_is(tmp_path: Path, resize: str) -> None:
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:, 20:33] = 200
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    Image.fromarray(pixels).save(tmp_path / "images" / "1.png")
    Image.fromarray((pixels[:, :, 0] > 100).astype(np.uint8)).save(tmp_path / "masks" / "1.png")
    source = penstock.open(tmp_path / "images", masks=str(tmp_path / "masks"), size=(20, 20), resize=resize)
    sample = source[0]
    assert sample["mask"].shape == (20, 20)
    assert np.abs((sample["image"][0] > 100).astype(int) - sample["mask"]).mean() <= 0.1


def test_images_without_a_mask_are_left_out_with_a_warning(tmp_path: Path) -> None:
    voc(tmp_path)
    with pytest.warns(UserWarning, match="left out: 2 of 3 images, without a mask of their name"):
        source = penstock.open(tmp_path / "JPEGImages", masks=str(tmp_path / "SegmentationClass"))
    assert len(source) == 1
    assert (source[0]["mask"] == 15).all()


def test_masks_of_other_names_are_found_by_a_function(tmp_path: Path) -> None:
    cityscapes(tmp_path)
    images, found = tmp_path / "leftImg8bit" / "train", tmp_path / "gtFine" / "train"
    with pytest.raises(SourceError, match=r"1 of 1 images have no mask of their name.*a function"):
        penstock.open(images, masks=str(found))
    source = penstock.open(
        images,
        masks=lambda path: path.replace("leftImg8bit.png", "gtFine_labelIds.png").replace("leftImg8bit", "gtFine"),
    )
    assert (source[0]["mask"] == 3).all()


def test_several_masks_of_one_image_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "1.png")
    for kind in ("a", "b"):
        picture(tmp_path / "masks" / kind / "1.png", 1, "L")
    with pytest.raises(SourceError, match="has several masks"):
        penstock.open(tmp_path / "images", masks=str(tmp_path / "masks"))
