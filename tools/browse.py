"""Opens a built site in headless Chromium, as a reader would. Called by ``tools/docs.py --check``.

Every page is opened from disk, without a server or a network. What is wrong is printed: links and anchors that lead
nowhere, pictures that do not load or have no alternative text, messages on the console, pages that are wider than a
phone, a first page whose code ends below the screen, and a search that does not find the classes that everyone looks
for.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["browse", "chromium"]

#: What the search must find, and on which page.
SEARCHES = {"GDSDataset": "reference/datasets.html", "prune": "howto/cleaning.html"}

#: Runs in a page: what it links to, which ids it has, and what is wrong with its pictures. A file's name, which Sphinx
#: writes where there is no alternative text, is none.
FACTS = """() => ({
  links: [...document.querySelectorAll('a[href]')].map(a => a.href),
  ids: [...document.querySelectorAll('[id]')].map(e => e.id),
  broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  silent: [...document.images].filter(i => !i.alt || /\\.(png|jpe?g|svg)$/.test(i.alt)).map(i => i.src),
})"""

#: Width of a phone, in CSS pixels, and how wide a page is with everything unfolded. (``window.innerWidth`` grows with a
#: page that is too wide.)
PHONE = 390
WIDTH = """() => { document.querySelectorAll('details').forEach(folded => folded.open = true);
  return document.documentElement.scrollWidth }"""

#: Where the first code of the first page ends, in pixels from the top.
FIRST = "() => document.querySelector('.first-page pre')?.getBoundingClientRect().bottom ?? 0"


def chromium() -> str | None:
    """The browser: Debian's, or what ``CHROMIUM`` names."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def browse(site: Path, pictures: Path | None = None) -> int:
    """Opens every page.

    Args:
        site: the folder of a built version.
        pictures: where screenshots of the first page and of one of the reference go; None makes none.

    Returns:
        0 if nothing is wrong, or if there is no browser; else 1.
    """
    executable = chromium()
    if executable is None:
        print("not opened in a browser: this machine has no Chromium (CHROMIUM=/path names one)")
        return 0
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        pages = sorted(site.rglob("*.html"))
        wrong = [*_look(context.new_page(), site, pages), *_search(context.new_page(), site)]
        phone = browser.new_context(viewport={"width": PHONE, "height": 844}, is_mobile=True, offline=True)
        wrong += _widths(phone.new_page(), site, pages)
        wrong += [line for where in (context, phone) for line in _first_screen(where.new_page(), site)]
        if pictures is not None:
            for name, where in (("desktop", context), ("phone", phone)):
                _take(where.new_page(), site, pictures, name)
        browser.close()
    for line in wrong:
        print(line)
    print(f"opened {len(pages)} pages: {len(wrong) or 'nothing'} wrong")
    return 1 if wrong else 0


def _look(page: Any, site: Path, pages: list[Path]) -> Iterator[str]:
    """Links, anchors, pictures and the console."""
    found: dict[str, Any] = {}
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    for path in pages:
        said.clear()
        page.goto(path.as_uri())
        facts = found[path.as_uri()] = page.evaluate(FACTS)
        name = path.relative_to(site)
        yield from (f"{name}: the console has {text!r}" for text in said)
        yield from (f"{name}: the picture {src} does not load" for src in facts["broken"])
        yield from (f"{name}: the picture {src} has no alternative text" for src in facts["silent"])
    for uri, facts in found.items():
        for link in sorted(set(facts["links"])):
            target, _, anchor = link.partition("#")
            if not target.startswith("file:"):
                continue
            there = target in found or Path(target.removeprefix("file://")).is_file()
            if not there or (anchor and target in found and anchor not in found[target]["ids"]):
                yield f"{Path(uri).relative_to(site.as_uri())}: {link} leads nowhere"


def _search(page: Any, site: Path) -> Iterator[str]:
    for words, target in SEARCHES.items():
        page.goto(f"{(site / 'search.html').as_uri()}?q={words}")
        page.wait_for_selector("#search-results li", timeout=20_000)
        page.wait_for_timeout(1000)
        hits = page.eval_on_selector_all("#search-results li a", "links => links.map(a => a.href)")
        if not any(target in hit for hit in hits):
            yield f"the search for {words!r} does not find {target}: {hits[:5]}"


def _widths(page: Any, site: Path, pages: list[Path]) -> Iterator[str]:
    for path in pages:
        page.goto(path.as_uri())
        if (width := page.evaluate(WIDTH)) > PHONE:
            yield f"{path.relative_to(site)}: {width} pixels wide, and a phone has {PHONE}"


def _first_screen(page: Any, site: Path) -> Iterator[str]:
    """What it is, the figure, the installation and the first lines of code are to be seen without scrolling."""
    page.goto((site / "index.html").as_uri())
    page.wait_for_load_state()
    end, screen = page.evaluate(FIRST), page.viewport_size["height"]
    if end > screen:
        yield f"index.html: its first code ends at {end:.0f} pixels, below a screen of {screen}"


def _take(page: Any, site: Path, pictures: Path, name: str) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    for path in ("index.html", "start.html", "reference/datasets.html", "benchmarks/training.html"):
        page.goto((site / path).as_uri())
        page.screenshot(path=pictures / f"{name}-{Path(path).stem}.png")


if __name__ == "__main__":
    sys.exit(browse(Path(sys.argv[1]).resolve(), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
