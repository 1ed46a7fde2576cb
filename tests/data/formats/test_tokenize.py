"""Text is tokenized on the fly, in every kind of worker."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.core.errors import ExtraError, OptionError, SourceError
from penstock.data.formats.tokens.tokenize import Tokenized
from penstock.loader.padding import PadCollate

WORDS = ["[UNK]", "<eos>", *(f"w{number}" for number in range(50))]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    path = tmp_path_factory.mktemp("text") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def lines(path: Path, count: int = 40) -> Path:
    path.write_text(
        "".join(
            json.dumps({"id": n, "text": " ".join(f"w{n % 50}" for _ in range(n % 9))}) + "\n" for n in range(count)
        )
    )
    return path


def test_a_text_becomes_tokens(file: Path) -> None:
    sample = Tokenized(file)({"text": "w0 w1 nothing w3", "id": 7})
    assert sample["tokens"].tolist() == [2, 3, 0, 5]
    assert sample["tokens"].dtype == np.int64
    assert sorted(sample) == ["id", "tokens"]
    sample = Tokenized(file, eos="<eos>", max_length=3, dtype="uint16", keep_text=True)({"text": "w0 w1 w2 w3"})
    assert sample["tokens"].tolist() == [2, 3, 1]
    assert sample["tokens"].dtype == np.uint16
    assert sample["text"] == "w0 w1 w2 w3"
    assert Tokenized(file, eos="<eos>", max_length=1)({"text": "w0"})["tokens"].tolist() == [1]
    renamed = Tokenized(file, text="a", tokens="b")({"a": "w4", "tokens": 3})
    assert renamed["b"].tolist() == [6]


def test_special_tokens_are_not_cut_off(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    sample = {"text": "a a a a a a"}
    assert Tokenized(path, max_length=4)(sample)["tokens"].tolist() == [1, 0, 0, 2]
    assert Tokenized(path, max_length=1)(sample)["tokens"].tolist() == [1]
    assert Tokenized(path, max_length=4, special_tokens=False)(sample)["tokens"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_give_padded_tokens(file: Path, tmp_path: Path, index: bool, loader: Any, workers: int) -> None:
    source = penstock.open(lines(tmp_path / "a.jsonl"), index=index).map(Tokenized(file))
    batches = loader(source, batch_size=8, num_workers=workers, collate_fn=PadCollate({"tokens": -1}))
    found = {
        int(number): tokens[tokens >= 0].tolist()
        for batch in batches
        for number, tokens in zip(batch["id"], batch["tokens"], strict=True)
    }
    assert found == {number: [number % 50 + 2] * (number % 9) for number in range(40)}
    source.close()


def test_threads_share_a_tokenizer(file: Path, tmp_path: Path) -> None:
    source = penstock.open(lines(tmp_path / "a.jsonl"), index=True).map(Tokenized(file))
    loader = penstock.DataLoader(source, batch_size=1, num_workers=3, worker_type="thread", shuffle=True)
    assert sum(batch["tokens"].shape[1] for batch in loader) == sum(number % 9 for number in range(40))
    source.close()


class Environment:
    def __init__(self, tokenized: Tokenized) -> None:
        self.tokenized = tokenized

    def __getitem__(self, index: int) -> Any:
        import os

        self.tokenized({"text": "w1"})
        return os.environ.get("TOKENIZERS_PARALLELISM", "unset")

    def __len__(self) -> int:
        return 1


def test_the_packages_own_threads_are_off_in_workers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    dataset = Environment(Tokenized(file))
    assert list(penstock.DataLoader(dataset, num_workers=1)) == [["false"]]
    assert dataset[0] == "unset"


def test_what_is_wrong_is_said(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="there is no file"):
        Tokenized(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SourceError, match="is no tokenizer file"):
        Tokenized(tmp_path / "bad.json")({"text": "a"})
    with pytest.raises(SourceError, match="a sample has no such field"):
        Tokenized(file)({"other": "a"})
    with pytest.raises(SourceError, match="a sample has int"):
        Tokenized(file)({"text": 3})
    with pytest.raises(SourceError, match="cannot be tokenized"):
        Tokenized(file)({"text": "\ud800"})
    with pytest.raises(OptionError, match="no token of"):
        Tokenized(file, eos="<end>")({"text": "a"})
    for wrong in ({"max_length": 0}, {"dtype": "float32"}):
        with pytest.raises(OptionError):
            Tokenized(file, **wrong)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ExtraError, match=r'pip install "penstock\[text\]"'):
        Tokenized(file)({"text": "a"})


def test_it_travels_without_the_tokenizer(file: Path) -> None:
    tokenized = Tokenized(file)
    tokenized({"text": "w1"})
    data = pickle.dumps(tokenized)
    assert len(data) < 1000
    assert torch.equal(torch.from_numpy(pickle.loads(data)({"text": "w1"})["tokens"]), torch.tensor([3]))
