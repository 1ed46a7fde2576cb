"""The allocator's settings are checked for what torch would refuse, or silently not do."""

from __future__ import annotations

import pytest

from penstock.memory.allocator import allocator_findings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("expandable_segments:true", "write expandable_segments:True"),
        ("expandable_segments:yes", "it is True or False"),
        ("Expandable_segments:True", "is no setting of the allocator's; expandable_segments is"),
        ("max_split_size_mb:16", "it must be over 20"),
        ("max_split_size_mb:many", "it is a whole number"),
        ("garbage_collection_threshold:80", "a share between 0 and 1"),
        ("backend:cudamallocasync", "native or cudaMallocAsync"),
        (
            "expandable_segments:True,max_split_size_mb:128",
            "max_split_size_mb does nothing with expandable_segments:True",
        ),
        ("backend:cudaMallocAsync,max_split_size_mb:128", "does nothing with backend:cudaMallocAsync"),
    ],
)
def test_what_is_wrong_is_said(settings: str, words: str) -> None:
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
def test_what_is_right_is_left_in_peace(settings: str) -> None:
    assert allocator_findings({"PYTORCH_CUDA_ALLOC_CONF": settings}) == []


def test_two_variables_that_differ_are_told() -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert allocator_findings(both) == [
        "PYTORCH_ALLOC_CONF counts, and PYTORCH_CUDA_ALLOC_CONF with another value does not"
    ]
