"""The HTML page, in a real browser: it opens from disk, sorts, filters and compares."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from playwright.sync_api import expect

from jaxamp_like import (
    amp,
    certify,
    convert,
    default_amp_policy,
    explain,
    trace_numerics,
)
from jaxamp_like._reports.data.records import CastRecord, OpRecord, Place, Program
from jaxamp_like.reports import StoredArray

from .browsing import chromium, listen

BF16 = {"compute_dtype": "bfloat16"}


def loss(w, x):
    with jax.named_scope("layers"):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
    with jax.named_scope("head </script>"):
        return jnp.mean(jnp.exp(x) ** 2)


ARGS = jnp.ones((8, 8)) / 3, jnp.ones((4, 8))


KEPT = StoredArray(
    scope="layers",
    phase="forward",
    primitive="tanh",
    source="model.py:3",
    decided="bfloat16",
    stored="bfloat16",
    size=2**20,
    times=1,
    is_kept=True,
    drift="",
)
WIDE = 2 * (dataclasses.replace(KEPT, stored="float32", size=2**21, drift="kept wide"),)


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    policy = default_amp_policy | {"layer_1": "float32"}
    gradient = jax.grad(amp(loss, **BF16))
    report = explain(gradient, compile=True)(*ARGS)
    other = explain(jax.grad(amp(loss, amp_policy=policy, **BF16)))(*ARGS)
    path = tmp_path_factory.mktemp("pages") / "new folder" / "page.html"
    numerics = trace_numerics(gradient)(*ARGS)
    certificate = dataclasses.replace(certify(gradient, *ARGS), arrays=(KEPT, *WIDE))
    views = dict(against=other, numerics=numerics, certificate=certificate)
    assert report.save_html(path, **views) == path
    assert path.stat().st_size < 2e6
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(params=(1280, 400))
def page(request, browser, page_path):
    """The page, opened; nothing may be asked of a network nor said on the console."""
    page = browser.new_page(viewport={"width": request.param, "height": 900})
    heard = listen(page)
    page.on("request", lambda request: heard.append(request.url))
    page.goto(page_path.as_uri())
    page.wait_for_selector("body[data-ready]")
    yield page
    assert [x for x in heard if not x.startswith(("file:", "data:"))] == []
    page.close()


def column(page, table, name):
    heads = page.locator(f"{table} th").all_inner_texts()
    (i,) = (i for i, head in enumerate(heads) if head.strip(" ▲▼") == name)
    return page.locator(f"{table} tbody tr td:nth-child({i + 1})").all_inner_texts()


@pytest.mark.rest
def test_it_shows_everything_and_fits(page):
    assert page.title() == "loss: precision report"
    for words in ("100.0 %", "saved for the backward pass", "layer_1: use_precision"):
        assert words in page.locator("main").inner_text()
    for chart in ("flops", "saved", "exponents"):
        drawing = page.locator(f"[data-chart={chart}] svg")
        expect(drawing).to_be_visible()
        width = page.viewport_size["width"]
        assert 200 < drawing.bounding_box()["width"] <= width
    overflow = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(overflow) <= 0
    size = "parseFloat(getComputedStyle(document.querySelector('td')).fontSize)"
    assert page.evaluate(size) >= 12
    assert page.locator("table.code tr.low").count() > 0


@pytest.mark.rest
def test_it_tells_the_memory_of_the_call(page):
    told = page.locator("#memory").inner_text()
    assert "What one call of the function takes; compiled for " in told
    rows = zip(
        column(page, "#memory", "memory of"),
        column(page, "#memory", "now"),
        strict=True,
    )
    found = dict(rows)
    assert found["argument: w"] == found["gradients"] == "256 B"
    assert found["argument: x"] == "128 B"
    assert found.keys() >= {"saved for backward", "results", "temporaries", "in all"}


@pytest.mark.rest
def test_decided_and_compiled_stand_beside_each_other(page):
    main = page.locator("main").inner_text()
    assert "float32 contractions multiply in" in main
    assert "kept for the backward pass" in main
    low = "bfloat16 x bfloat16 -> bfloat16"
    shown = [
        column(page, "[data-table=compiled]", head) for head in ("decided", "compiled")
    ]
    assert low in shown[0] and shown[0] == shown[1]
    assert {*column(page, "[data-table=arrays]", "differs")} == {"", "kept wide"}
    assert column(page, "[data-table=arrays]", "bytes") == ["4 MiB", "1 MiB"]
    for chart in ("compiledFlops", "compiledKept"):
        expect(page.locator(f"[data-chart={chart}] svg")).to_be_visible()


@pytest.mark.quick
def test_what_is_no_certificate_is_told(tmp_path):
    report = explain(loss, **BF16)(*ARGS)
    with pytest.raises(TypeError, match=r"`certify\(.*\)` gives, but got str"):
        report.save_html(tmp_path / "page.html", certificate="precision.lock")


@pytest.mark.rest
def test_the_tree_of_scopes_opens_and_sorts(page):
    tree = page.locator("[data-tree]")
    assert "layer_1" not in tree.inner_text()
    tree.get_by_role("button", name="layers").click()
    assert "layer_1" in tree.inner_text() and "head" in tree.inner_text()
    tree.get_by_role("button", name="equations").click()
    counts = [int(x) for x in column(page, "[data-tree]", "equations")]
    assert counts[0] == max(counts)
    tree.get_by_role("button", name="layers").click()
    assert "layer_1" not in tree.inner_text()
    # Two bars in a cell: this policy, and the one that it is compared with.
    assert tree.locator("tbody tr").first.locator(".bar").count() == 4


@pytest.mark.rest
def test_equations_are_sorted_and_filtered(page):
    table = "[data-table=ops]"
    place = page.locator(table)
    place.get_by_role("button", name="count", exact=True).click()
    counts = [int(x) for x in column(page, table, "count")]
    assert counts == sorted(counts, reverse=True)
    place.get_by_role("button", name="count", exact=True).click()
    counts = [int(x) for x in column(page, table, "count")]
    assert counts == sorted(counts)
    place.get_by_role("searchbox").fill("layer_2 Backward")
    assert set(column(page, table, "phase")) == {"backward"}
    assert set(column(page, table, "scope")) == {"layers/layer_2"}
    place.get_by_role("searchbox").fill("no such thing")
    assert place.locator("tbody tr").count() == 0


@pytest.mark.rest
def test_a_long_table_shows_its_rest_when_asked(page):
    place = page.locator("[data-table=rules]")
    assert place.locator("tbody tr").count() == 25
    place.get_by_role("button", name="Show all").click()
    assert place.locator("tbody tr").count() > 100


@pytest.mark.rest
def test_the_comparison_shows_what_differs(page):
    table = "[data-table=differences]"
    page.locator(table).get_by_role("searchbox").fill("dot_general forward")
    assert column(page, table, "scope") == ["layers/layer_1"]
    assert column(page, table, "this policy") == ["1 bfloat16"]
    assert column(page, table, "the other") == ["1 float32"]


@pytest.mark.rest
def test_numerics_are_sorted_by_error(page):
    table = "[data-table=numerics]"
    page.locator(table).get_by_role("button", name="error").click()
    errors = [float(x) for x in column(page, table, "error")]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0
    scopes = column(page, "[data-table=scopeNumerics]", "scope")
    assert scopes[0] == "(all)" and "layers/layer_1" in scopes
    assert "no inf or NaN" in page.locator("#trouble").inner_text()


@pytest.mark.rest
def test_numerics_have_a_page_of_their_own(browser, tmp_path):
    report = trace_numerics(loss, amp_policy={})(*ARGS)
    page = browser.new_page()
    page.goto(report.save_html(tmp_path / "numerics.html").as_uri())
    page.wait_for_selector("body[data-ready]")
    assert page.locator("[data-table=numerics] tbody tr").count() > 3
    page.close()


def huge(count):
    """A program of so many equations, all different."""

    def place(i):
        scope = f"model/layer_{i // 10}/block_{i % 10}"
        return Place(scope, ("jit",), "forward", f"/model.py:{i} (call)", 1)

    bf16 = ("bfloat16",)
    ops = tuple(
        OpRecord(
            place(i), "dot_general", "dot_general", ("float32",) * 3, bf16 * 2, bf16,
            (8, 8), "dot_general", "use_compute_precision", "computes in bfloat16", 512,
        )
        for i in range(count)
    )  # fmt: skip
    casts = tuple(
        CastRecord(op.place, "float32", "bfloat16", (8, 8), True, "read low")
        for op in ops
    )
    return Program(ops, casts, ())


@pytest.mark.rest
def test_a_huge_program_has_a_page_of_ordinary_size(browser, tmp_path):
    report = explain(loss, **BF16)(*ARGS)
    program = huge(100_000)
    report = dataclasses.replace(report, now=program, written=program)
    path = report.save_html(tmp_path / "huge.html")
    assert path.stat().st_size < 5e6
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")
    assert "100000" in page.locator(".tiles").first.inner_text()
    page.get_by_role("button", name="model").click()
    assert 100 < page.locator("[data-tree] tbody tr").count() <= 3002
    assert "… and 7001 more" in page.locator("[data-tree]").inner_text()
    page.close()


@pytest.mark.rest
def test_an_empty_function_has_a_page(browser, tmp_path):
    path = explain(lambda: None, **BF16)().save_html(tmp_path / "empty.html")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")
    assert page.locator("[data-table=ops] tbody tr").count() == 0
    page.close()


def test_what_is_shown_beside_must_be_a_report(tmp_path):
    report, numerics = explain(loss, **BF16)(*ARGS), trace_numerics(loss)(*ARGS)
    with pytest.raises(TypeError, match=r"`against` .* `explain\(fn\)\(\*args\)`"):
        report.save_html(tmp_path / "page.html", against=numerics)
    with pytest.raises(TypeError, match=r"`numerics` .* got Report"):
        report.save_html(tmp_path / "page.html", numerics=report)


def test_an_unwritable_path(tmp_path):
    report = explain(loss, **BF16)(*ARGS)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "page.html", tmp_path):
        with pytest.raises(OSError, match="the report could not be written") as info:
            report.save_html(path)
        assert info.value.filename == str(path)


@pytest.mark.rest
def test_the_page_of_a_conversion(browser, tmp_path):
    low = convert(loss, *ARGS, **BF16)
    page = browser.new_page()
    heard = []
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.goto(low.summary.save_html(tmp_path / "page.html").as_uri())
    page.wait_for_selector("body[data-ready]")
    rows = page.locator("#parameters tbody tr")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("only ever cast to bfloat16")
    expect(page.locator("#contractions tbody tr")).to_have_count(3)
    page.close()
    assert heard == []
