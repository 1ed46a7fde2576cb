"""Make a README's links absolute, as a package index needs them: `python .ci/absolute_links.py README.md`.

In the repository they are relative, so that they lead somewhere in every checkout.
"""

import re
import sys
from pathlib import Path

PAGES = "https://github.com/penstock/penstock/blob/main/"
FILES = "https://raw.githubusercontent.com/penstock/penstock/main/"
_ELSEWHERE = r"(?!\w+://|#)"


def with_absolute_links(text: str) -> str:
    """Return `text` with links to the repository's pages and pictures.

    >>> with_absolute_links('[a](docs/a.md#b) [c](https://c) ![d](docs/d.svg) <img src="e.png">').replace(FILES, "FILES/")
    '[a](https://github.com/penstock/penstock/blob/main/docs/a.md#b) [c](https://c) ![d](FILES/docs/d.svg) <img src="FILES/e.png">'
    """  # noqa: E501
    text = re.sub(rf'((?:src|srcset)="){_ELSEWHERE}', rf"\g<1>{FILES}", text)
    text = re.sub(rf"(!\[[^]]*\]\(){_ELSEWHERE}", rf"\g<1>{FILES}", text)
    return re.sub(rf"(\]\(){_ELSEWHERE}", rf"\g<1>{PAGES}", text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(with_absolute_links(page.read_text()))
