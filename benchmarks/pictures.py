"""Make the pictures of docs/pictures from one real run: the panel of `penstock run`, and its report, light and dark.

    python -m benchmarks.pictures [--card]

Runs examples/train_digits.py, takes the panel in a late batch as SVG, and photographs report.html with chromium. The
card that sites show beside a link, social.png, is made from the logo; `--card` makes it alone.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich import _export_format, terminal_theme
from rich.console import Console
from rich.text import Text

from penstock.observe.live import panel
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.live.status_file import active_runs, private_folder

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
COLUMNS = 100
LEAST_BATCHES = 10  # more than the held-out images have
SIZE = (1200, 900)
CARD_SIZE = (1280, 640)
CARD = """<!doctype html><style>
body {{ margin: 0; width: 1280px; height: 640px; display: flex; align-items: center; gap: 64px; background: #fff;
  font-family: "DejaVu Sans", sans-serif; color: #24292f }}
svg {{ width: 384px; margin-left: 96px; flex: none }}
h1 {{ font-size: 88px; margin: 0 0 24px }}
p {{ font-size: 34px; line-height: 1.4; margin: 0 96px 0 0 }}
</style>{logo}<div><h1>Penstock</h1><p>{text}</p></div>"""
CARD_TEXT = "Feeds PyTorch training at the speed of the machine, and fits it into the memory of the device."
THEMES = {"light": terminal_theme.DEFAULT_TERMINAL_THEME, "dark": terminal_theme.DIMMED_MONOKAI}
# A picture in a page must make no request of its own: rich's format loads a font.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", _export_format.CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def run_and_watch(folder: Path, epochs: int) -> LiveSnapshot:
    """Run the example in `folder`, and return what its panel shows in a late batch."""
    for name in ("make_digits.py", "train_digits.py"):
        shutil.copy(ROOT / "examples" / name, folder)
    subprocess.run([sys.executable, "make_digits.py"], cwd=folder, check=True)
    command = [sys.executable, "-m", "penstock", "run", "train_digits.py", "--epochs", str(epochs)]
    seen: LiveSnapshot | None = None
    with subprocess.Popen(command, cwd=folder) as program:
        while program.poll() is None:
            for status in active_runs(private_folder()):
                now = status.snapshot
                is_training = (now.length or 0) > LEAST_BATCHES and now.epoch > 0
                if now.pid == program.pid and is_training and LEAST_BATCHES < now.batch < (now.length or 0):
                    seen = now
            time.sleep(0.2)
    if seen is None:
        raise SystemExit("the run was too short to be seen; pass more --epochs")
    return seen


def write_panel(snapshot: LiveSnapshot) -> None:
    """Write the panel as SVG, in both themes."""
    for name, theme in THEMES.items():
        console = Console(record=True, width=COLUMNS, file=open("/dev/null", "w"))  # noqa: SIM115
        for line in panel.render(snapshot, columns=COLUMNS, rows=panel.ROWS):
            console.print(Text.from_ansi(line), no_wrap=True)
        drawn = console.export_svg(title="penstock run train_digits.py", theme=theme, code_format=FORMAT)
        (PICTURES / f"panel-{name}.svg").write_text("\n".join(map(str.rstrip, drawn.splitlines())) + "\n")


def write_report(page: Path) -> None:
    """Photograph the top of the report in both colour schemes."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        for name in THEMES:
            features = [{"name": "prefers-color-scheme", "value": name}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            browser.set_window_size(*SIZE)
            browser.get(page.as_uri())
            time.sleep(2)
            browser.save_screenshot(str(PICTURES / f"report-{name}.png"))
    finally:
        browser.quit()


def write_card(folder: Path) -> None:
    """Draw the card of the project."""
    page = folder / "card.html"
    page.write_text(CARD.format(logo=(ROOT / "docs/logo.svg").read_text(), text=CARD_TEXT))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is needed to draw the card")
    size = "--window-size={},{}".format(*CARD_SIZE)
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
    subprocess.run([browser, *options, f"--screenshot={PICTURES / 'social.png'}", page.as_uri()], check=True)


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--card", action="store_true", help="the card alone")
    args = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        write_card(Path(name))
        if args.card:
            return
        write_panel(run_and_watch(Path(name), args.epochs))
        write_report(Path(name) / "report.html")


if __name__ == "__main__":
    main()
