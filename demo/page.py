"""The page: all pictures and numbers in one file that needs nothing else."""

from base64 import b64encode
from html import escape
from pathlib import Path
from string import Template

from demo.arriving import SLOTS, WRONG, Arrived
from demo.digit_pictures import draw_errors, painted
from demo.fold_picture import draw as draw_fold
from demo.streaming import PIXELS_SEEN
from demo.ten_million import Folded

TEMPLATE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
SHOWN = (2, 3, 4, 5, 8, 9)  # one digit of each of these kinds


def write_page(out: Path, arrived: Arrived, folded: Folded) -> Path:
    """Draw the pictures into a folder, and write the page that shows them beside the numbers."""
    draw_errors(out / "digits.png", arrived)
    draw_fold(out / "fold.png", folded.results)
    slots, wrong = arrived.outcomes[SLOTS], arrived.outcomes[WRONG]
    text = TEMPLATE.substitute(
        digits=len(arrived.unseen.images),
        first=f"{slots.errors[0]:.3f}",
        last=f"{slots.errors[-1]:.3f}",
        difference=f"{slots.difference:.1e}",
        wrong=f"{wrong.errors[-1]:.3f}",
        grid=grid(arrived),
        digit_chart=picture((out / "digits.png").read_bytes(), "Error against pixels seen."),
        digit_table=arrived.sheet().for_page(),
        size=f"{folded.size:,}",
        fold_picture=picture(
            (out / "fold.png").read_bytes(), "Slots of a galaxy, how the encoding settled, memory."
        ),
        fold_table=folded.sheet().for_page(),
        approach="".join(
            f"<li>{seen:,} elements: {distance:.1e}</li>"
            for seen, distance in folded.approach.items()
        ),
    )
    page = out / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def grid(arrived: Arrived) -> str:
    """Digits from top to bottom, pixels seen from left to right."""
    head = "".join(f"<th>{pixels}</th>" for pixels in PIXELS_SEEN)
    blocks = "".join(block(arrived, kind) for kind in SHOWN)
    return (
        f'<table class="digits"><thead><tr><th>pixels</th>{head}<th>digit</th></tr></thead>'
        f"{blocks}</table>"
    )


def block(arrived: Arrived, number: int) -> str:
    """One digit: what was seen of it, and what was made of that."""
    image, order = (part[number].numpy() for part in arrived.unseen)
    rows = {
        "seen": [painted(image, order[:pixels]) for pixels in PIXELS_SEEN],
        "slots": [painted(made[number]) for made in arrived.outcomes[SLOTS].completions],
        "wrong": [painted(made[number]) for made in arrived.outcomes[WRONG].completions],
    }
    truth = f'<td rowspan="3">{picture(painted(image), "the digit")}</td>'
    cells = {
        name: "".join(f"<td>{picture(one, name)}</td>" for one in made)
        for name, made in rows.items()
    }
    cells["seen"] += truth
    lines = "".join(f"<tr><th>{name}</th>{made}</tr>" for name, made in cells.items())
    return f"<tbody>{lines}</tbody>"


def picture(png: bytes, meaning: str) -> str:
    """An image inside the page."""
    data = b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(meaning)}">'
