"""Pages in Chromium, as people meet them: narrow and wide, light and dark, by keyboard.

What an accessibility library (axe-core) finds is listed as lines of text."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
LOOKS = [(width, scheme) for width in WIDTHS for scheme in SCHEMES]

# What a mouse can operate. Of radio buttons Tab leads to one, arrows to others; of
# what has a `tabindex` of -1 the author says that there is another way to the same.
OPERABLE = (
    ":is(a[href], button:not([disabled]), input:not([type=radio]), select, summary, "
    "[onclick]):not([tabindex='-1'], [hidden])"
)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "Pages are tested in Chromium: `.ci/browser` installs it."
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=options)
        yield browser
        browser.close()


def listen(page: Page) -> list[str]:
    """What a page will say on the console, and the errors of its scripts."""
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    return heard


def barriers(page: Page) -> list[str]:
    """What axe-core finds on a page as it is now: by its rules, also those of habit."""
    found = Axe().run(page).response["violations"]
    return [_told(rule, node) for rule in found for node in rule["nodes"]]


def _told(rule: dict[str, Any], node: dict[str, Any]) -> str:
    checks = node["any"] + node["all"] + node["none"]
    why = checks[0]["message"] if checks else rule["help"]
    return f"{rule['id']} ({rule['impact']}) at {node['html'][:100]}: {why}"


def out_of_reach(page: Page) -> list[str]:
    """What is shown and can be operated, but not reached by pressing Tab."""
    count = page.evaluate(
        """(operable) => {
            globalThis.unreached = new Set([...document.querySelectorAll(operable)]
                .filter((one) => one.checkVisibility({ visibilityProperty: true })));
            document.activeElement.blur();
            return unreached.size;
        }""",
        OPERABLE,
    )
    for _ in range(2 * count + 10):  # tables that scroll are stops, too
        page.keyboard.press("Tab")
        left = page.evaluate("unreached.delete(document.activeElement), unreached.size")
        if not left:
            break
    told = "[...unreached].map((one) => one.outerHTML.slice(0, 100))"
    return page.evaluate(told)
