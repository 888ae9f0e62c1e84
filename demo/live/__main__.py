"""Train two models, or load them, and serve a page on which sets arrive element by element."""

import sys
import webbrowser
from argparse import ArgumentParser
from pathlib import Path

import torch
import uvicorn
from rich.console import Console

from demo.completion import STEPS
from demo.digits import MissingDigitsError
from demo.live.app import make_app
from demo.live.models import load


def main() -> str | None:
    """Parse the command line and serve; returns an error message or None."""
    parser = ArgumentParser(prog="python -m demo.live", description=__doc__)
    parser.add_argument("--port", type=int, default=8765, help="port of the page")
    parser.add_argument("--out", type=Path, default=Path("out/live"), help="folder for the models")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps for the digits")
    parser.add_argument("--shape-steps", type=int, help="training steps for the shapes")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    given = parser.parse_args()
    if given.steps < 1 or (given.shape_steps is not None and given.shape_steps < 1):
        parser.error("--steps and --shape-steps must be 1 or more.")
    console = Console(highlight=False)
    try:
        parts = load(given.out, given.steps, given.shape_steps, console)
    except MissingDigitsError as error:
        return str(error)
    except (KeyboardInterrupt, ChildProcessError) as error:
        return f"stopped. {error}".strip()
    torch.set_num_threads(1)
    address = f"http://127.0.0.1:{given.port}"
    console.print(f"The page is at {address}. Ctrl-C stops it.", soft_wrap=True)
    if given.open:
        webbrowser.open(address)
    uvicorn.run(make_app(parts), host="127.0.0.1", port=given.port, log_level="warning")
    return None


if __name__ == "__main__":
    sys.exit(main())
