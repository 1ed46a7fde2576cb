"""`python -m penstock` is `penstock`."""

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    # `python -m` puts the current folder there, and a stranger's json.py may lie in it. The command has its own folder.
    sys.path[0] = os.path.dirname(sys.executable)

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main())
