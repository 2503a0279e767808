"""Makes the pictures of the README and the documentation from a real run.

    python docs/make_pictures.py

It trains `configs/digits.py`, records what the terminal shows, and photographs the report with
Chromium, which `--chromium=PATH` names where it is not found.
"""

import argparse
import io
import os
import pathlib
import pty
import shutil
import subprocess
import sys
import tempfile

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image, ImageChops
from rich.console import Console
from rich.text import Text

ROOT = pathlib.Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
COLUMNS = 100
SECTIONS = ("reliability", "risk_coverage", "training")  # Those of the report that are shown.


def shown_on_a_terminal(command: list[str]) -> str:
    """Runs a command on a new terminal, and returns all that it printed."""
    reading, writing = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=writing,
        stderr=writing,
        env=os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"},
    )
    os.close(writing)
    parts = []
    while True:
        try:
            part = os.read(reading, 65536)
        except OSError:  # the terminal is closed when the command ends
            break
        if not part:
            break
        parts.append(part)
    if process.wait():
        raise SystemExit(b"".join(parts).decode())
    return b"".join(parts).decode()


def lines_that_stay(printed: str) -> list[str]:
    """Returns the lines that a terminal shows at the end, without those that were overwritten."""
    lines = printed.replace("\r\n", "\n").split("\n")
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines]


def draw_terminal(command: str, printed: str) -> None:
    """Writes a picture of a terminal with a command and what it printed."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {command}", style="bold"))
    for line in lines_that_stay(printed):
        console.print(Text.from_ansi(line))
    console.save_svg(str(IMAGES / "terminal.svg"), title="dist_ens")


def draw_mesh(rows: int = 4, columns: int = 2, members: int = 8) -> None:
    """Writes a picture of a mesh: which members and which part of a batch each device holds."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    colours = pyplot.get_cmap("tab10").colors
    per_row = members // rows
    for row in range(rows):
        y = rows - 1 - row
        for column in range(columns):
            axes.add_patch(Rectangle((column * 2.4, y), 2.2, 0.85, fill=False, lw=1.2))
            device = row * columns + column
            axes.text(column * 2.4 + 0.08, y + 0.68, f"device {device}", fontsize=8, va="center")
            for place in range(per_row):
                member = row * per_row + place
                box = FancyBboxPatch(
                    (column * 2.4 + 0.15 + place * 1.02, y + 0.12),
                    0.85,
                    0.34,
                    boxstyle="round,pad=0.03",
                    fc=(*colours[member % 10], 0.35),
                    ec="none",
                )
                axes.add_patch(box)
                axes.text(
                    column * 2.4 + 0.575 + place * 1.02,
                    y + 0.29,
                    f"member {member}",
                    fontsize=7.5,
                    ha="center",
                    va="center",
                )
        axes.annotate(
            "",
            (2.42, y + 0.55),
            (2.18, y + 0.55),
            arrowprops={"arrowstyle": "<->", "color": "tab:red"},
        )
    for column in range(columns):
        part = f"examples {column * 64} to {column * 64 + 63}"
        axes.text(column * 2.4 + 1.1, rows + 0.06, part, fontsize=8, ha="center")
    middle = (2.4 * columns - 0.2) / 2
    axes.text(middle, rows + 0.4, 'axis "data": parts of a batch', ha="center", fontsize=10)
    axes.text(-0.25, rows / 2, 'axis "ensemble"', rotation=90, va="center", fontsize=10)
    axes.text(
        middle,
        -0.3,
        "Sums are exchanged within a row. Nothing crosses between rows.",
        fontsize=8.5,
        ha="center",
        color="tab:red",
    )
    axes.set_xlim(-0.5, 2.4 * columns)
    axes.set_ylim(-0.5, rows + 0.7)
    axes.axis("off")
    figure.savefig(IMAGES / "mesh.svg", bbox_inches="tight", metadata={"Date": None})


def photograph(chromium: str, page: pathlib.Path, picture: pathlib.Path, *, dark: bool) -> None:
    """Writes a screenshot of a page, as long as what is on it."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                "--window-size=1180,3000",
                f"--screenshot={picture}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
        )
    whole = Image.open(picture).convert("RGB")
    background = Image.new("RGB", whole.size, whole.getpixel((0, 0)))
    bottom = ImageChops.difference(whole, background).getbbox()[3]
    whole.crop((0, 0, whole.width, bottom + 30)).save(picture, optimize=True)


def main() -> None:
    """Trains, and makes the four pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    chromium = parser.parse_args().chromium
    IMAGES.mkdir(exist_ok=True)
    draw_mesh()
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "digits"
        command = "dist-ens train --config=configs/digits.py --workdir=runs/digits"
        arguments = ["--config=configs/digits.py", f"--workdir={workdir}"]
        printed = shown_on_a_terminal([sys.executable, "-m", "launch.train", *arguments])
        draw_terminal(command, printed.replace(str(workdir), "runs/digits"))
        figures = pathlib.Path(folder) / "figures.html"
        report = (workdir / "report.html").read_text()
        others = "section" + "".join(f":not(#{name})" for name in SECTIONS)
        figures.write_text(f"{report}<style>{others} {{ display: none }}</style>")
        photograph(chromium, figures, IMAGES / "report.png", dark=False)
        photograph(chromium, figures, IMAGES / "report_dark.png", dark=True)


if __name__ == "__main__":
    main()
