"""Files of another user, which only root can make."""

from __future__ import annotations

import os

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
