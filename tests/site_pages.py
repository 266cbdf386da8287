"""Opens the pages of the built site in Chromium, and looks for barriers.

    python -m tests.site_pages FOLDER [--all]

Those of KINDS wide and light, and narrow and dark; with `--all`, every page in all four
looks. Prints what axe-core finds,
what a page says on the console, whether it is too wide, what the keyboard doesn't
reach and which of NAMES the search doesn't find, and then ends with 1. `.ci/docs` calls
it."""

import argparse
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Browser

from .browsing import LOOKS, SCHEMES, barriers, chromium, listen, out_of_reach

# A page of each kind: texts, tables and figures, what doctests and docstrings make.
KINDS = ("index.html", "reports/index.html", "api/main/index.html")

# What is searched for: our names, and those of others, which may be parts of longer
# ones, as in `jax.named_scope`.
NAMES = """amp amp_stop enable_amp guard_step explain trace_numerics calibrate certify
convert low_bit_state saving_low PolicyMap default_amp_policy DynamicScalerState
dynamic_scale_value_and_grad unscale_grads overflowed_leaves scope_modules
torch.autocast GradScaler named_scope apply_if_finite filter_jit value_and_grad
checkpoint BatchNorm float8_e4m3fn nvfp4 stochastic NaN shard_map""".split()
ANSWERED = """() => {
    const told = document.querySelector(".md-search-result__meta").innerText;
    return told && !/^(Init|Type)/.test(told);
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address under which a folder can be read; the site's scripts need one."""
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def asked(folder: Path, every: bool) -> list[tuple[str, tuple[int, str]]]:
    """Pages, each with the width and the scheme that it is looked at in."""
    if not every:
        return [(page, look) for page in KINDS for look in (LOOKS[0], LOOKS[-1])]
    pages = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*.html")
    )
    return [(page, look) for page in pages for look in LOOKS]


def findings(
    browser: Browser, address: str, look: tuple[int, str], keyboard: bool
) -> list[str]:
    width, scheme = look
    page = browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    heard = listen(page)
    page.goto(address, wait_until="load")
    page.wait_for_selector(".md-search[aria-label]", state="attached")
    found = barriers(page) + [f"console: {line}" for line in heard]
    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    if overflow > 0:
        found.append(f"is {overflow} px wider than the window")
    if keyboard:
        found += [f"no Tab leads to {one}" for one in out_of_reach(page)]
    page.close()
    return found


def unfound(browser: Browser, address: str) -> list[str]:
    """The names of which the search finds nothing."""
    page = browser.new_page()
    missing = []
    for name in NAMES:
        page.goto(f"{address}/index.html?q={name}", wait_until="load")
        page.wait_for_function(ANSWERED)
        if not page.locator(".md-search-result__item").count():
            missing.append(name)
    page.close()
    return missing


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.site_pages")
    parser.add_argument("folder", type=Path, help="the built site")
    parser.add_argument("--all", action="store_true", help="look at every page")
    args = parser.parse_args()
    failed = False
    with served(args.folder) as address, chromium() as browser:
        for page, look in asked(args.folder, args.all):
            keyboard = page in KINDS and look[1] == SCHEMES[0]
            for line in findings(browser, f"{address}/{page}", look, keyboard):
                print(f"{page}, {look[0]} px, {look[1]}: {line}")
                failed = True
        for name in unfound(browser, address):
            print(f"the search doesn't find {name}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
