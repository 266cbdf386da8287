"""The pages that are written, for who sees little, no colours, or uses no mouse."""

import jax
import jax.numpy as jnp
import pytest

from jaxamp_like import (
    amp,
    calibrate,
    certify,
    convert,
    default_amp_policy,
    explain,
    trace_numerics,
)

from .browsing import LOOKS, barriers, chromium, listen, out_of_reach

pytestmark = pytest.mark.rest

BF16 = {"compute_dtype": "bfloat16"}


def loss(w, x):
    for i in range(3):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(jnp.exp(x) ** 2)


ARGS = jnp.ones((8, 8)) / 3, jnp.ones((4, 8))


def write_report(path):
    policy = default_amp_policy | {"layer_1": "float32"}
    gradient = jax.grad(amp(loss, **BF16))
    other = explain(jax.grad(amp(loss, amp_policy=policy, **BF16)))(*ARGS)
    numerics = trace_numerics(gradient)(*ARGS)
    views = dict(numerics=numerics, certificate=certify(gradient, *ARGS))
    explain(gradient)(*ARGS).save_html(path, against=other, **views)


def write_numerics(path):
    trace_numerics(loss, **BF16)(*ARGS).save_html(path)


def write_conversion(path):
    convert(loss, *ARGS, **BF16).summary.save_html(path)


def write_calibration(path):
    batches = [(ARGS[0], ARGS[1] + i) for i in range(2)]
    calibrate(loss, batches, budget=0.5).save_html(path)


WRITERS = (write_report, write_numerics, write_conversion, write_calibration)


@pytest.fixture(scope="module", params=WRITERS, ids=lambda fn: fn.__name__)
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "page.html"
    request.param(path)
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


def opened(browser, path, width=1280, scheme="light"):
    page = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    heard = listen(page)
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")
    return page, heard


@pytest.mark.cross("path", look=4)
@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_a_page_has_no_barriers(look, browser, path):
    page, heard = opened(browser, path, *look)
    # As it is once somebody has opened and sorted what there is.
    for closed in page.locator("details:not([open]) > summary").all():
        closed.click()
    for head in page.locator("th:first-child button").all():
        head.click()
    while (name := page.locator("button[aria-expanded=false]").first).count():
        name.click()
    assert barriers(page) == []
    assert heard == []
    page.close()


@pytest.mark.cross("path", width=2)
@pytest.mark.parametrize("width", (1280, 400))
def test_what_can_be_operated_is_reached_by_the_keyboard(width, browser, path):
    page, _ = opened(browser, path, width)
    assert out_of_reach(page) == []
    page.close()


@pytest.fixture
def report(browser, tmp_path):
    write_report(tmp_path / "page.html")
    page, heard = opened(browser, tmp_path / "page.html")
    yield page
    assert heard == []
    page.close()


def test_a_tree_is_opened_by_the_keyboard(report):
    root = report.locator("button.name").first
    root.focus()
    for shown in ("false", "true", "false"):
        report.keyboard.press("Enter")
        assert root.get_attribute("aria-expanded") == shown
        assert root.evaluate("one => one === document.activeElement")


def test_a_table_is_sorted_by_the_keyboard(report):
    head = report.locator("[data-table=ops] th").nth(1)
    head.locator("button").focus()
    for order in ("Space", "Enter"):
        before = head.get_attribute("aria-sort")
        report.keyboard.press(order)
        assert head.get_attribute("aria-sort") not in (None, before)


def test_the_keyboard_goes_on_where_a_long_table_was_cut(report):
    table = report.locator("[data-table=rules]")
    table.get_by_role("button", name="Show all").focus()
    report.keyboard.press("Enter")
    row = table.locator("tbody tr").nth(25)
    assert row.evaluate("one => one === document.activeElement")


def test_precisions_are_told_in_words_too(report):
    lines = report.locator("table.code tr.low")
    assert "bfloat16" in lines.first.locator("td").nth(1).inner_text()
    bars = report.locator("[data-tree] .bar")
    assert "bfloat16 100 %" in bars.first.get_attribute("aria-label")
    chart = report.locator("[data-chart=flops]")
    assert chart.get_attribute("aria-label") == "FLOPs of contractions, by dtype"
