"""The settings of torch's caching allocator (PYTORCH_ALLOC_CONF): mistakes in them, and whether segments are cut.

Source: torch's notes "CUDA semantics", on optimizing memory usage, and c10's AllocatorConfig, which reads them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_BOOLEANS = frozenset(
    {
        "expandable_segments",
        "graph_capture_record_stream_reuse",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)
_NUMBERS = frozenset(
    {"max_split_size_mb", "max_non_split_rounding_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb"}
)
_OTHERS = frozenset(
    {"backend", "garbage_collection_threshold", "roundup_power2_divisions", "per_process_memory_fraction"}
)
_KEYS = _BOOLEANS | _NUMBERS | _OTHERS
_MIN_SPLIT_MB = 20


def allocator_findings(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return what is wrong or has no effect in the allocator's settings; empty if nothing is.

    >>> allocator_findings({"PYTORCH_ALLOC_CONF": "expandable_segments:true"})
    ['PYTORCH_ALLOC_CONF: expandable_segments:true will raise; it is case-sensitive, write expandable_segments:True']
    """
    environment = os.environ if environment is None else environment
    found = [name for name in VARIABLES if environment.get(name)]
    if not found:
        return []
    name, *ignored = found
    findings = []
    if len({environment[one] for one in found}) > 1:
        findings.append(f"{name} is used, and {' and '.join(ignored)} with another value is ignored")
    settings = _parse(environment[name])
    for key, value in settings:
        findings += [f"{name}: {text}" for text in _check_setting(key, value)]
    return findings + [f"{name}: {text}" for text in _check_combination(dict(settings))]


def cuts_segments(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the allocator gives out pieces of segments, between which memory lies that nothing fits into.

    >>> cuts_segments({}), cuts_segments({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    (True, False)
    """
    environment = os.environ if environment is None else environment
    settings = dict(_parse(next((environment[name] for name in VARIABLES if environment.get(name)), "")))
    return settings.get("expandable_segments") != "True" and settings.get("backend") != "cudaMallocAsync"


def _parse(text: str) -> list[tuple[str, str]]:
    """Cut "a:1,b:[x:1,y:2]" at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [(key.strip(), value.strip()) for key, _, value in (part.partition(":") for part in parts if part.strip())]


def _check_setting(key: str, value: str) -> list[str]:
    if key not in _KEYS:
        near = difflib.get_close_matches(key.lower(), _KEYS, 1)
        return [f"{key} is not a setting of the allocator{f'; did you mean {near[0]}?' if near else ''}"]
    if key in _BOOLEANS and value not in ("True", "False"):
        if value.capitalize() in ("True", "False"):
            return [f"{key}:{value} will raise; it is case-sensitive, write {key}:{value.capitalize()}"]
        return [f"{key}:{value} will raise; it must be True or False"]
    if key in _NUMBERS:
        if not value.isdigit():
            return [f"{key}:{value} will raise; it must be a whole number"]
        if key == "max_split_size_mb" and int(value) <= _MIN_SPLIT_MB:
            return [f"{key}:{value} will raise; it must be over {_MIN_SPLIT_MB}"]
    if key in ("garbage_collection_threshold", "per_process_memory_fraction") and not _is_fraction(value):
        return [f"{key}:{value} will raise; it must be a fraction between 0 and 1"]
    if key == "backend" and value not in ("native", "cudaMallocAsync"):
        return [f"backend:{value} will raise; it must be native or cudaMallocAsync"]
    return []


def _check_combination(settings: Mapping[str, str]) -> list[str]:
    findings = []
    if settings.get("expandable_segments") == "True":
        ignored = [key for key in ("max_split_size_mb",) if key in settings]
        findings += [f"{key} has no effect with expandable_segments:True" for key in ignored]
    if settings.get("backend") == "cudaMallocAsync":
        findings += [f"{key} has no effect with backend:cudaMallocAsync" for key in settings if key != "backend"]
    return findings


def _is_fraction(value: str) -> bool:
    try:
        return 0 < float(value) < 1
    except ValueError:
        return False
