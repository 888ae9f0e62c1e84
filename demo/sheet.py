"""A table of numbers for the terminal and for the page."""

from collections.abc import Mapping
from html import escape
from typing import NamedTuple

from rich.table import Table


class Sheet(NamedTuple):
    """A table with an explanation of its rows and columns; the last row is the wrong way."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: Mapping[str, str]  # what each row or column means

    def for_terminal(self) -> Table:
        """Format the table with rich."""
        caption = "\n".join(f"{term}: {text}" for term, text in self.notes.items())
        table = Table(title=self.title, caption=caption, caption_justify="left")
        for number, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in self.rows[:-1]:
            table.add_row(*row)
        table.add_section()
        table.add_row(*self.rows[-1], style="bold")
        return table

    def for_page(self) -> str:
        """Format the table and its notes as HTML; wide tables scroll."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        notes = "".join(
            f"<li><b>{escape(term)}</b>: {escape(text)}</li>" for term, text in self.notes.items()
        )
        return (
            f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
            f'<tbody>{body}</tbody></table></div><ul class="notes">{notes}</ul>'
        )
