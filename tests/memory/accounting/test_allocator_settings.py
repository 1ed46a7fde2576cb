"""The allocator's settings are checked for what torch would refuse, or silently not do."""

from __future__ import annotations

import pytest

from penstock.memory.accounting.allocator_settings import allocator_findings, cuts_segments


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("expandable_segments:true", "write expandable_segments:True"),
        ("expandable_segments:yes", "it must be True or False"),
        ("Expandable_segments:True", "is not a setting of the allocator; did you mean expandable_segments?"),
        ("max_split_size_mb:16", "it must be over 20"),
        ("max_split_size_mb:many", "it must be a whole number"),
        ("garbage_collection_threshold:80", "a fraction between 0 and 1"),
        ("backend:cudamallocasync", "native or cudaMallocAsync"),
        (
            "expandable_segments:True,max_split_size_mb:128",
            "max_split_size_mb has no effect with expandable_segments:True",
        ),
        ("backend:cudaMallocAsync,max_split_size_mb:128", "has no effect with backend:cudaMallocAsync"),
    ],
)
def test_a_wrong_setting_is_reported(settings: str, words: str) -> None:
    findings = allocator_findings({"PYTORCH_ALLOC_CONF": settings})
    assert len(findings) == 1
    assert findings[0].startswith("PYTORCH_ALLOC_CONF: ")
    assert words in findings[0]


@pytest.mark.parametrize(
    "settings",
    [
        "expandable_segments:True",
        "max_split_size_mb:128, garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:8],backend:native",
        "",
    ],
)
def test_a_right_setting_is_not_reported(settings: str) -> None:
    assert allocator_findings({"PYTORCH_CUDA_ALLOC_CONF": settings}) == []


def test_two_variables_with_different_values_are_reported() -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert allocator_findings(both) == [
        "PYTORCH_ALLOC_CONF is used, and PYTORCH_CUDA_ALLOC_CONF with another value is ignored"
    ]


def test_segments_are_cut_unless_they_expand_or_the_driver_allocates() -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    assert cuts_segments({})
    assert cuts_segments({name: "max_split_size_mb:64,expandable_segments:False"})
    assert not cuts_segments({name: "max_split_size_mb:64,expandable_segments:True"})
    assert not cuts_segments({name: "backend:cudaMallocAsync"})
