"""Writes what CI installs, with the hashes of its files. Needs `uv` (pip install uv).

    make lock

.ci/constraints.hashed.txt is for the tests, .ci/conda.hashed.txt for the conda recipe. Versions are those of
constraints.txt. torch is left out, with the CUDA packages that its PyPI wheel needs: CI takes the CPU wheel of
PyTorch's index, which is another file, with another hash, than the one of the same version on PyPI ("2.13.0+cpu").
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LEFT_OUT = re.compile(r"torch|triton|cuda-.*|nvidia-(?!ml-py).*")
COMPILE = "uv pip compile --universal --python-version 3.11.5 --generate-hashes --no-header --no-annotate --quiet"
FILES = {
    "constraints": ("--constraint constraints.txt --extra dev --extra docs pyproject.toml", ""),
    "conda": ("--no-deps -", "py-rattler-build"),
}
"""What uv is given for each file: arguments, and a list of packages."""


def is_for_ci(requirement: str) -> bool:
    """Return whether CI needs a requirement, as in 'name==1.0 ; marker', on Linux with any of its Pythons."""
    pinned, _, marker = requirement.partition(" ; ")
    if LEFT_OUT.fullmatch(pinned.partition("==")[0]):
        return False
    linux = {"sys_platform": "linux", "os_name": "posix", "platform_machine": "x86_64", "platform_system": "Linux"}
    made_by = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return not marker or any(
        Marker(marker).evaluate({**linux, **made_by, "python_version": version, "python_full_version": f"{version}.0"})
        for version in PYTHONS
    )


def main() -> None:
    """Write the files."""
    for name, (arguments, packages) in FILES.items():
        command = [*COMPILE.split(), *arguments.split()]
        found = subprocess.run(command, cwd=ROOT, input=packages, stdout=subprocess.PIPE, text=True, check=True).stdout
        blocks = re.split(r"\n(?=\S)", found.strip())
        kept = [block for block in blocks if is_for_ci(block.partition(" \\\n")[0])]
        text = "\n".join(["# Written by `make lock`; do not edit.", *kept, ""])
        (ROOT / ".ci" / f"{name}.hashed.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
