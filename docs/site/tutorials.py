"""Runs the Python blocks of a page, and puts what they print and draw below them.

python docs/site/tutorials.py docs/tutorials/first-ensemble.md FOLDER

The blocks of a page share one process and its names, as the cells of a notebook do. A block ends
with an expression to show its value: a figure as SVG, anything else as text. A block that fails
stops the build. Pages may write files; HTML files of a page become files of the site.

Results are kept in build/tutorials until the page or a file of the package changes.
"""

import argparse
import ast
import contextlib
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(__file__).parents[2]
KEPT = HOME / "build" / "tutorials"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def executed(page):
    """The folder with the results of a page, which is run if nothing fitting is kept."""
    folder = KEPT / page.stem / digest(page)[:16]
    if not (folder / "results.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")]),
            "MPLBACKEND": "agg",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, str(page), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{page.name} failed:\n{done.stderr[-4000:]}")
    return folder


def digest(page):
    """A digest of the page, the package and its version of torch."""
    import torch

    found = hashlib.sha256(torch.__version__.encode())
    for path in [page, Path(__file__), *sorted((HOME / "shoal").rglob("*.py"))]:
        found.update(path.read_bytes())
    return found.hexdigest()


def with_results(text, folder):
    """The text of a page, with the results of every block below it."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = iter(results["blocks"])
    text = BLOCK.sub(lambda block: block[0] + shown(next(found)), text)
    return (
        f"{text}\n---\n\n*The code of this page was run when the site was built. "
        f"It took {results['seconds']:.0f} seconds of one CPU core.*\n"
    )


def shown(result):
    """The result of a block as Markdown."""
    parts = [f'<div class="result"><pre>{html.escape(result["text"])}</pre></div>'] * bool(
        result["text"]
    )
    parts += [f'<figure class="result">{figure}</figure>' for figure in result["figures"]]
    return "".join(f"\n\n{part}\n" for part in parts)


def run(page, folder):
    """Run every block of a page in `folder`, and write results.json there."""
    os.chdir(folder)
    names, blocks, start = {"__name__": "__main__"}, [], time.process_time()
    for number, block in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8"))):
        blocks.append(run_block(block[1], names, f"{page.stem}-{number}"))
    results = {"seconds": time.process_time() - start, "blocks": blocks}
    Path("results.json").write_text(json.dumps(results), encoding="utf-8")


def run_block(code, names, label):
    """What one block prints and draws."""
    tree = ast.parse(code, label)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, label, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), label, "eval"), names)
    figures = value if isinstance(value, list) else [value]
    if value is not None and all(hasattr(figure, "savefig") for figure in figures):
        drawn = [drawing(figure, f"{label}-{i}") for i, figure in enumerate(figures)]
        return {"text": printed.getvalue(), "figures": drawn}
    text = "" if value is None else value if isinstance(value, str) else repr(value)
    return {"text": (printed.getvalue() + text).strip("\n"), "figures": []}


def drawing(figure, label):
    """A figure as one SVG element, without empty lines, which would end the HTML of a page."""
    from shoal.plots import svg

    return re.sub(r"\n\s*\n", "\n", svg(figure, label, label)).strip()


def main():
    """Run one page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    run(options.page.resolve(), options.folder.resolve())


if __name__ == "__main__":
    main()
