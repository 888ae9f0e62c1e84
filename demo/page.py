"""Write the page: a self-contained HTML file with all pictures and numbers."""

from base64 import b64encode
from html import escape
from pathlib import Path
from string import Template

from demo.arriving import SLOTS, WHOLE, WRONG, Arrived
from demo.digit_pictures import draw_errors, painted
from demo.fold_picture import draw as draw_fold
from demo.streaming import PIXELS_SEEN
from demo.ten_million import Folded

TEMPLATE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
SHOWN = range(10)  # the held-out digits on the page, one of each class


def write_page(out: Path, arrived: Arrived, folded: Folded) -> Path:
    """Write pictures and page to a folder; returns the path of the page."""
    draw_errors(out / "digits.png", arrived)
    draw_fold(out / "fold.png", folded.results)
    slots, wrong = arrived.outcomes[SLOTS], arrived.outcomes[WRONG]
    text = TEMPLATE.substitute(
        digits=len(arrived.unseen.images),
        first=f"{slots.errors[0]:.3f}",
        half=f"{slots.errors[PIXELS_SEEN.index(392)]:.3f}",
        last=f"{slots.errors[-1]:.3f}",
        difference=f"{slots.difference:.1e}",
        wrong=f"{wrong.errors[-1]:.3f}",
        whole=f"{arrived.outcomes[WHOLE].errors[-1]:.3f}",
        grid=grid(arrived),
        digit_chart=picture(
            (out / "digits.png").read_bytes(),
            "Mean squared error per pixel against the number of pixels that have arrived.",
        ),
        digit_table=arrived.sheet().for_page(),
        size=f"{folded.size:,}",
        fold_picture=picture(
            (out / "fold.png").read_bytes(),
            "A: stars coloured by slot. B: convergence of the encoding. C: peak memory.",
        ),
        fold_table=folded.sheet().for_page(),
        approach="".join(
            f"<li>after {seen:,} stars: {distance:.1e}</li>"
            for seen, distance in folded.approach.items()
        ),
    )
    page = out / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def grid(arrived: Arrived) -> str:
    """Make the grid of digits: a block of three rows per digit, a column per number of pixels."""
    head = "".join(f"<th>{pixels}</th>" for pixels in PIXELS_SEEN)
    blocks = "".join(block(arrived, kind) for kind in SHOWN)
    return (
        '<div class="scroll"><table class="digits"><colgroup><col class="label"></colgroup>'
        f"<thead><tr><th>pixels that have arrived</th>{head}<th>original</th></tr></thead>"
        f"{blocks}</table></div>"
    )


def block(arrived: Arrived, number: int) -> str:
    """Make the rows of one digit: its arrived pixels and two completions."""
    image, order = (part[number].numpy() for part in arrived.unseen)
    rows = {
        "input": [painted(image, order[:pixels]) for pixels in PIXELS_SEEN],
        "slots on a grid": [painted(made[number]) for made in arrived.outcomes[SLOTS].completions],
        "chunk and average (wrong)": [
            painted(made[number]) for made in arrived.outcomes[WRONG].completions
        ],
    }
    truth = f'<td rowspan="3">{picture(painted(image), "original digit")}</td>'
    cells = {
        name: "".join(f"<td>{picture(one, name)}</td>" for one in made)
        for name, made in rows.items()
    }
    cells["input"] += truth
    lines = "".join(f"<tr><th>{name}</th>{made}</tr>" for name, made in cells.items())
    return f"<tbody>{lines}</tbody>"


def picture(png: bytes, meaning: str) -> str:
    """Embed a PNG in the page."""
    data = b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(meaning)}">'
