"""A table of numbers, for the terminal and for the page."""

from html import escape
from typing import NamedTuple

from rich.table import Table


class Sheet(NamedTuple):
    """Rows under headings; the last row is the wrong way, which stands out."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    caption: str

    def for_terminal(self) -> Table:
        """With rich: names to the left, numbers to the right."""
        table = Table(title=self.title, caption=self.caption, caption_justify="left")
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in self.rows[:-1]:
            table.add_row(*row)
        table.add_section()
        table.add_row(*self.rows[-1], style="bold")
        return table

    def for_page(self) -> str:
        """As HTML that scrolls by itself where it is wider than the screen."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return (
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
            f"<p><small>{escape(self.caption)}</small></p>"
        )
