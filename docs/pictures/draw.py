"""Draws the pictures of these pages, light and dark. `python docs/pictures/draw.py` writes the
files that lie beside it; a test holds them against this program.

    Picture(width, height) has shapes; str() of it is the file.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
.ground{fill:#fff;stroke:#d0d7de}
text{font:13px system-ui,sans-serif;fill:#24292f}
.small{font-size:11px}.title{font-weight:600}.quiet{fill:#57606a}
.middle{text-anchor:middle}.end{text-anchor:end}
.box{fill:#f6f8fa;stroke:#8c959f}
.device{fill:#ddf4ff;stroke:#0969da}.host{fill:#dafbe1;stroke:#1a7f37}
.ssd{fill:#fff8c5;stroke:#9a6700}.work{fill:#fbefff;stroke:#8250df}
.line{stroke:#57606a;fill:none}.dashed{stroke-dasharray:4 3}
.tip{fill:#57606a}
@media(prefers-color-scheme:dark){
.ground{fill:#0d1117;stroke:#30363d}
text{fill:#e6edf3}.quiet{fill:#9198a1}
.box{fill:#161b22;stroke:#656c76}
.device{fill:#10304f;stroke:#4493f8}.host{fill:#10361c;stroke:#3fb950}
.ssd{fill:#3a2e08;stroke:#d29922}.work{fill:#2e1f4d;stroke:#ab7df8}
.line{stroke:#9198a1}.tip{fill:#9198a1}
}"""
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="tip" d="M0 0L8 4L0 8z"/></marker>'
)


class Picture:
    """Shapes on a ground of its own, so that it can be read on any page."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._title = title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """A rectangle; `kind`: a class of STYLE."""
        self._shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="3"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """A line of text, whose baseline is at `y`."""
        self._shapes.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def labelled(
        self, x: float, y: float, width: float, height: float, text: str, kind: str = "box"
    ) -> None:
        """A rectangle with a line of text in its middle."""
        self.box(x, y, width, height, kind)
        self.text(x + width / 2, y + height / 2 + 4, text, "middle small")

    def arrow(self, points: list[tuple[float, float]], text: str = "", kind: str = "") -> None:
        """Through some points, with a tip; its text is above the middle of the first stretch."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self._shapes.append(f'<path class="line {kind}" d="{path}" marker-end="url(#tip)"/>')
        if text:
            (x, y), (u, v) = points[:2]
            self.text((x + u) / 2, (y + v) / 2 - 5, text, "middle small quiet")

    def line(self, x: float, y: float, u: float, v: float, kind: str = "dashed") -> None:
        """A line without a tip."""
        self._shapes.append(f'<path class="line {kind}" d="M{x:g} {y:g}L{u:g} {v:g}"/>')

    def __str__(self) -> str:
        """The file."""
        width, height = self._size
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" role="img" aria-label="{escape(self._title)}">\n'
            f"<title>{escape(self._title)}</title>\n<style>{STYLE}\n</style>\n<defs>{TIP}</defs>\n"
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" '
            f'rx="6"/>\n{shapes}\n</svg>\n'
        )


def tiers() -> Picture:
    """The three tiers, what rests in each, and the links between them."""
    picture = Picture(760, 330, "Three tiers, the pages in them, and the links between them")
    rows = (
        ("device", "device", "GPU memory, or a region of host memory", 20),
        ("host", "host", "pinned main memory", 130),
        ("ssd", "ssd", "files without names, in the folders that you gave", 240),
    )
    held = {
        "device": ("block 3", "block 4", "head", "activations", "free for PyTorch"),
        "host": ("block 1", "gradients", "moments", "activations", "staging"),
        "ssd": ("block 0 … 2", "moments", "moments", "moments", "activations"),
    }
    for kind, name, what, y in rows:
        picture.box(20, y, 600, 72, kind)
        picture.text(34, y + 20, name, "title")
        picture.text(34 + 9 * len(name) + 8, y + 20, what, "small quiet")
        for i, text in enumerate(held[kind]):
            picture.labelled(34 + 116 * i, y + 32, 108, 28, text)
    picture.labelled(634, 20, 112, 72, "modules compute", "work")
    picture.labelled(634, 130, 112, 72, "optimizer works", "work")
    for y, up, down in ((92, "upload", "download"), (202, "read", "write")):
        picture.arrow([(230, y + 38), (230, y)])
        picture.text(222, y + 24, up, "end small quiet")
        picture.arrow([(400, y), (400, y + 38)])
        picture.text(408, y + 24, down, "small quiet")
    picture.text(634, 262, "each box: pages", "small quiet")
    picture.text(634, 280, "of 64 KiB to 64 MiB", "small quiet")
    return picture


def step() -> Picture:
    """One step over time, on the lanes that work at once."""
    picture = Picture(860, 300, "One step over time: what each lane does")
    left, unit, y0 = 120, 42, 44
    lanes = ("device computes", "upload", "download", "read from SSD", "optimizer", "write to SSD")
    for i, name in enumerate(lanes):
        y = y0 + 38 * i
        picture.text(left - 10, y + 19, name, "end small")
        picture.line(left, y + 33, 846, y + 33)

    def put(lane: int, start: float, length: float, text: str, kind: str) -> None:
        picture.labelled(left + unit * start, y0 + 38 * lane, unit * length - 3, 28, text, kind)

    for i in range(4):  # forward: a unit's parameters come while the one ahead of it computes
        put(0, 1 + i, 1, f"fwd {i}", "device")
        put(1, 0.1 + i, 0.8, f"p{i}", "host")
    put(3, 0.1, 0.9, "p2", "ssd")
    put(3, 1.1, 0.9, "p3", "ssd")
    for n, i in enumerate((3, 2, 1, 0)):  # backward: gradients leave while the next unit computes
        put(0, 5 + 1.5 * n, 1.5, f"bwd {i}", "device")
        put(2, 6.5 + 1.5 * n, 0.8, f"g{i}", "host")
        if n:
            put(1, 4 + 1.5 * n, 0.8, f"p{i}", "host")
    put(3, 4.4, 0.9, "p2", "ssd")
    for i in range(4):  # updates begin at step(), in the order in which the next forward needs them
        put(3, 11 + i, 0.9, f"s{i}", "ssd")
        put(4, 12 + i, 0.7, f"u{i}", "work")
        put(5, 12.75 + i, 0.9, f"s{i}", "ssd")
        put(1, 12.75 + i, 0.5, f"p{i}", "host")
        put(0, 13.3 + i, 1, f"fwd {i}", "device")
    for at, until, name in ((1, 5, "forward"), (5, 11, "backward"), (13.3, 17.3, "next forward")):
        picture.line(left + unit * at - 2, 22, left + unit * at - 2, 274)
        picture.text(left + unit * (at + until) / 2, 32, name, "middle small quiet")
    picture.line(left + unit * 11 - 2, 22, left + unit * 11 - 2, 274)
    picture.text(left + unit * 11 + 4, 32, "step()", "small quiet")
    picture.text(
        left, 291, "p: parameters, g: gradients, s: state, u: update, by unit", "small quiet"
    )
    return picture


def life() -> Picture:
    """What becomes of one parameter in a step."""
    picture = Picture(860, 250, "One parameter's life in a step")
    lanes = (("device", 40), ("host", 110), ("ssd", 180))
    for name, y in lanes:
        picture.box(70, y - 20, 770, 54, name)
        picture.text(60, y + 12, name, "end title")
    stations = (
        (90, 180, "rests: value and moments"),
        (90, 110, "staging: checksum"),
        (250, 40, "the view shows it: forward"),
        (440, 40, "again: backward"),
        (440, 110, "gradient lands"),
        (640, 110, "worker: next version"),
        (640, 180, "written back"),
    )
    for x, y, text in stations:
        picture.labelled(x, y - 10, 180, 32, text)
    picture.arrow([(180, 170), (180, 142)])
    picture.arrow([(180, 100), (180, 56), (250, 56)])
    picture.arrow([(430, 56), (440, 56)])
    picture.arrow([(530, 62), (530, 100)])
    picture.arrow([(620, 116), (640, 116)])
    picture.arrow([(730, 132), (730, 170)])
    picture.arrow([(640, 186), (270, 186)])
    picture.text(450, 201, "next step", "middle small quiet")
    picture.text(70, 238, "Where it rests, and which of these ways it takes, is planned.", "small")
    return picture


def choices() -> Picture:
    """What a planner may choose for each unit."""
    picture = Picture(860, 330, "What the planner chooses, and how")
    picture.labelled(20, 30, 150, 44, "recorded step", "work")
    picture.labelled(20, 100, 150, 44, "budgets", "work")
    picture.labelled(20, 170, 150, 44, "speeds of each lane", "work")
    for y in (52, 122, 192):
        picture.arrow([(170, y), (210, y)])
    picture.box(210, 20, 420, 220)
    picture.text(226, 42, "for each unit", "title")
    rows = (
        ("parameters rest in", (("device", "device"), ("host", "host"), ("ssd", "ssd"))),
        ("state rests in", (("device", "device"), ("host", "host"), ("ssd", "ssd"))),
        ("activations are", (("kept", "device"), ("swapped", "host"), ("recomputed", "work"))),
        ("the batch is", (("whole", "box"), ("2 slices", "box"), ("k slices", "box"))),
    )
    for i, (what, ways) in enumerate(rows):
        y = 56 + 44 * i
        picture.text(226, y + 20, what, "small")
        for j, (text, kind) in enumerate(ways):
            picture.labelled(352 + 90 * j, y, 84, 30, text, kind)
    picture.arrow([(630, 130), (670, 130)])
    picture.labelled(670, 108, 170, 44, "simulate six lanes", "work")
    picture.arrow([(755, 152), (755, 196)])
    picture.labelled(670, 196, 170, 44, "shortest that fits", "work")
    picture.arrow([(670, 226), (650, 226), (650, 262), (420, 262), (420, 242)], kind="dashed")
    picture.text(535, 279, "change one unit, a run, a pair; again", "middle small quiet")
    picture.arrow([(755, 240), (755, 272)])
    picture.labelled(670, 272, 170, 40, "plan: followed, measured", "host")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "tiers": tiers,
    "step": step,
    "life": life,
    "choices": choices,
}


def main() -> None:
    """Writes the files."""
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(str(draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
