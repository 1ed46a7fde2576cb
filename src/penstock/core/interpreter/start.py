"""Runs some code in a new process, with the import path that it is told. See `arguments_of`.

    python .../start.py CODE COUNT FOLDER... ARGUMENT...

Nothing is imported before the path is set but `sys`, which is a part of the interpreter.
"""

import sys

if __name__ == "__main__":
    code, count = sys.argv[1], int(sys.argv[2])
    sys.path[:] = sys.argv[3 : 3 + count]
    del sys.argv[1 : 3 + count]
    exec(code)
