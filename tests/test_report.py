"""What the report says of records: the alternatives, the tables, the charts, and the page as a whole."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import toy
from texts import markdown

from warploom.bench import records as records_module
from warploom.bench.fingerprint import fingerprint
from warploom.bench.records import LIMIT, Record, append, mark_large_hosts, save_environment
from warploom.errors import WarploomError
from warploom.report import panels as panels_module
from warploom.report import write_report
from warploom.report.chart import TOP, Chart, make_charts, render_chart
from warploom.report.overview import make_case_table, make_overview
from warploom.report.palette import choose_looks
from warploom.report.panels import arrange, load_sections
from warploom.report.published import FOLDER, list_published_cases, read_published
from warploom.report.rivals import format_ratio, summarize
from warploom.report.table import Cell, Table, render_text
from warploom.report.tables import make_tables, make_time_table
from warploom.testing.specs import load_specs

BENCH = replace(toy.make_bench(), name="lrpe-rotate", title="A rotation")
SHAPE = {"batch": 12, "heads": 12, "head_dim": 128, "dtype": "bfloat16"}
SIZES = (256, 1024, 4096)
GPU = {
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "0123456789abcdef",
}
CPU = {"device": "cpu", "cpu": "A plain CPU", "torch": "2.11.0"}


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (records_module, panels_module):
        monkeypatch.setattr(module, "benches", lambda: {BENCH.name: BENCH})


def make_records(
    providers: dict[str, float], environment: str = "here", activations=("none", "silu")
) -> list[Record]:
    """Records of a bench in which each provider needs so many times the limit."""
    records = []
    for activation in activations:
        for mode in ("fwd", "bwd"):
            for n in SIZES:
                limit = n * 1e-4
                common = Record(
                    operator="lrpe_rotate",
                    suite="published",
                    case={**SHAPE, "activation": activation, "n": n},
                    provider=LIMIT,
                    mode=mode,
                    fingerprint="",
                    environment=environment,
                    run="r",
                    ms=limit,
                    min_bytes=n * 1000,
                    limit_ms=limit,
                    limit_fraction=1.0,
                )
                records.append(common)
                for provider, times in providers.items():
                    ms = limit * times
                    measured: dict[str, object] = {
                        "ms": ms,
                        "ms_p20": ms * 0.95,
                        "ms_p80": ms * 1.1,
                        "peak_memory_mib": n / 8.0,
                    }
                    checked = {"max_error": 0.004, "error_budget": 0.016, "host_us": 8.0}
                    measured["fingerprint"] = fingerprint(BENCH, common.case, provider, mode, "")
                    records.append(
                        replace(common, provider=provider, limit_fraction=1 / times, **measured, **checked)
                    )
    return records


def fail(records: list[Record], provider: str, mode: str, n: int, **changes: object) -> None:
    """Replace a provider's records of one size by some that have no speed."""
    for i, record in enumerate(records):
        if (record.provider, record.mode, record.case["n"]) == (provider, mode, n):
            records[i] = replace(record, **changes)


def save(folder: Path, records: list[Record], environment: dict[str, object], name: str = "here") -> Path:
    append(folder, records)
    save_environment(folder, name, environment, "r")
    return folder


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    records = make_records({"warploom": 1.05, "warploom_variant": 1.5, "torch": 8.0, "torch_compile": 4.0})
    nothing = {"ms": None, "limit_fraction": None}
    fail(records, "warploom", "bwd", 1024, status="incorrect", reason="0.31 over the budget <b>&", **nothing)
    fail(records, "torch", "fwd", 4096, status="oom", reason="CUDA out of memory", **nothing)
    fail(records, "warploom_variant", "bwd", 256, status="unsupported", reason="no table here", **nothing)
    fail(records, "torch_compile", "fwd", 256, status="error", reason="<script>alert(1)</script>", **nothing)
    fail(records, "warploom", "fwd", 4096, fingerprint="of earlier code", ms=0.000123)
    return save(tmp_path / "run", records, GPU)


def page_of(*sources: Path) -> str:
    """The report."""
    return write_report(sources, sources[0] / "report.html").read_text(encoding="utf-8")


def body_text(page: str) -> str:
    """What a reader sees, with single spaces."""

    class Text(HTMLParser):
        def __init__(self):
            super().__init__()
            self.words, self.quiet = [], False

        def handle_starttag(self, tag, attrs):
            self.quiet = tag in ("script", "style")

        def handle_endtag(self, tag):
            self.quiet = False

        def handle_data(self, data):
            if not self.quiet:
                self.words.append(data)

    parser = Text()
    parser.feed(page)
    return " ".join(" ".join(parser.words).split())


# The fastest alternative


def only(records: list[Record], mode: str = "fwd"):
    (section,) = arrange(records)
    return next(row for row in summarize(section) if row.mode == mode)


def test_the_alternative_is_the_fastest_case_by_case_losses_included():
    records = make_records({"warploom": 2.0, "torch": 8.0, "other": 3.0}, activations=("none",))
    fail(records, "other", "fwd", 256, ms=256e-4 * 1.5, ms_p20=256e-4 * 1.45, ms_p80=256e-4 * 1.55)
    fail(records, "torch", "fwd", 1024, ms=1024e-4 * 2.02, ms_p20=1024e-4 * 1.9, ms_p80=1024e-4 * 2.1)
    found = only(records)
    assert [(pair.b.provider, round(pair.ratio, 3)) for pair in found.pairs] == [
        ("other", 0.75),
        ("torch", 1.01),
        ("other", 1.5),
    ]
    assert (found.lost, found.level, found.ratios) == (1, 1, "1.01 (0.75 … 1.50)")
    assert found.alternatives == "other, torch"


def test_a_table_without_one_of_the_peers_says_something_else():
    providers = {"warploom": 2.0, "torch": 8.0, "torch_naive": 1.6, "liger": 2.4}
    whole = only(make_records(providers))
    assert (whole.lost, whole.alternatives) == (6, "torch_naive")
    for dropped in ("torch_naive", "liger", "torch"):
        rest = make_records({name: times for name, times in providers.items() if name != dropped})
        assert (only(rest).ratios != whole.ratios) == (dropped == "torch_naive")
        shown = {head for table in make_tables(rest) for head in table.heads}
        assert dropped not in shown
        assert {head for table in make_tables(make_records(providers)) for head in table.heads} > shown


def test_a_sentence_says_what_is_faster_level_and_slower():
    records = make_records({"warploom": 2.0, "torch": 8.0, "other": 3.0}, activations=("none",))
    fail(records, "other", "fwd", 256, ms=256e-4 * 1.5, ms_p20=256e-4 * 1.45, ms_p80=256e-4 * 1.55)
    fail(records, "torch", "fwd", 1024, ms=1024e-4 * 2.02, ms_p20=1024e-4 * 1.9, ms_p80=1024e-4 * 2.1)
    fail(records, "warploom", "bwd", 256, disturbed="thermal slowdown")
    fail(records, "torch", "bwd", 1024, run="another")
    fail(records, "other", "bwd", 1024, run="another")
    overview = make_overview(arrange(records, {"here": "NVIDIA H100 80GB HBM3"}))
    (row,) = overview.rows
    assert row.sentence == (
        "Faster than the fastest alternative in 2 of 4 cases, 1.50 times; level in 1 (1.01); "
        "slower in 1, up to 1.33 times the time of other (fwd, n=256); 50\N{NO-BREAK SPACE}% of the limit."
    )
    assert row.note == (
        "Not counted: 1 without an alternative in the same run, 1 disturbed. "
        "Cases with each of the others: torch 5, other 5."
    )
    assert row.place == "H100"
    assert [dot.result for dot in row.dots] == ["slower", "level", "faster", "faster"]
    assert overview.counts == {"faster": 2, "level": 1, "slower": 1}
    assert overview.losses == "lrpe_rotate (1)"
    places = {label: x for x, label in overview.ticks}
    assert row.dots[0].x < places["1×"] < row.dots[2].x == pytest.approx(places["1.5×"])
    assert row.dots[2].lane != row.dots[3].lane
    assert row.dots[0].words.splitlines()[:3] == ["lrpe_rotate fwd", "n=256", "warploom: 51.2 µs"]
    results = {(row[2].text, row[3].text): row[-1].text for row in make_case_table(overview).rows}
    assert results[("fwd", "n=256")] == "slower"
    assert results[("bwd", "n=1024")] == ""


def test_a_sentence_about_other_functions_names_them(tmp_path: Path):
    (row,) = make_overview(arrange(make_records({"torch": 3.0, "torch_compile": 2.0}, activations=("none",)))).rows
    assert row.sentence.startswith("PyTorch's definition: faster than the fastest")
    assert "slower in 6" in row.sentence
    assert not row.ours
    assert row.definition
    assert make_tables(make_records({"torch": 3.0}))[0].heads[-1] != "fastest other / ours"
    assert not any(cell.ours for line in make_tables(make_records({"torch": 3.0}))[0].rows for cell in line)
    stale = save(tmp_path / "run", [replace(r, operator="gone") for r in make_records({"warploom": 2.0})], GPU)
    (row,) = make_overview(load_sections([stale])).rows
    assert row.sentence == "No time of the present code."
    assert row.note == "12 measured with earlier code."


def test_what_has_none_of_ours_is_no_row_of_the_overview():
    (section,) = arrange(make_records({"torch_naive": 1.6, "liger": 2.4}), {"e": "GPU"})
    assert summarize(section)
    assert make_overview([section]).rows == []


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "another"},
        {"disturbed": "thermal"},
        {"status": "incorrect", "ms": None},
        {"provider": "warploom_variant"},
    ],
)
def test_what_is_of_another_run_doubtful_wrong_or_ours_is_no_alternative(changes):
    records = make_records({"warploom": 2.0, "torch": 8.0, "other": 1.0})
    for i, record in enumerate(records):
        if record.provider == "other":
            records[i] = replace(record, **changes)
    found = only(records)
    assert found.lost == 0
    assert {pair.b.provider for pair in found.pairs} <= {"torch"}


def test_records_without_a_run_have_no_ratio():
    records = [replace(record, run="") for record in make_records({"warploom": 2.0, "torch": 8.0})]
    assert only(records).pairs == []
    assert only(records).ratios == ""


def test_no_loss_is_rounded_away():
    assert (format_ratio(0.951), format_ratio(0.996), format_ratio(1.004), format_ratio(12.34)) == (
        "0.95",
        "1.00",
        "1.00",
        "12",
    )
    records = make_records({"warploom": 1.0, "torch": 0.996})
    narrow = [replace(r, ms_p20=r.ms * 0.9995, ms_p80=r.ms * 1.0005) for r in records]
    assert only(narrow).lost == 6  # the count says what two digits cannot


def test_other_functions_are_no_alternative(monkeypatch):
    bench = replace(BENCH, others=(toy.make_other(),))
    for module in (records_module, panels_module):
        monkeypatch.setattr(module, "benches", lambda: {bench.name: bench})
    found = only(make_records({"warploom": 2.0, "torch": 8.0, "squared": 0.5}))
    assert {pair.b.provider for pair in found.pairs} == {"torch"}


# Tables


def test_tables_have_sizes_down_and_providers_across():
    records = make_records({"warploom": 1.05, "torch": 8.0}, activations=("silu",))
    fail(records, "torch", "fwd", 4096, status="oom", reason="no room", ms=None)
    speed, memory, *_ = make_tables(records)
    assert speed.title == "lrpe_rotate  fwd  bf16  batch 12  heads 12  head_dim 128  activation silu  ms"
    assert speed.heads == ["n", "warploom", "torch", LIMIT, "of the limit", "fastest other / ours", "GB/s"]
    rows = [[cell.text or cell.state for cell in row] for row in speed.rows]
    assert rows[0] == ["256", "0.02688", "0.2048", "0.02560", "95%", "torch 7.62", "9.52"]
    assert rows[2] == ["4096", "0.4301", "oom", "0.4096", "95%", "", "9.52"]
    assert speed.notes == ["oom: torch at n = 4096: no room"]
    assert memory.title.endswith("peak MiB")
    plain = render_text([speed, memory], 80)
    assert all(len(line) <= 80 for line in plain.splitlines())
    assert "−1" not in plain
    lines = markdown([speed]).splitlines()
    assert lines[2:5] == [
        "| n | warploom | torch | limit | of the limit | fastest other / ours | GB/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 256 | 0.02688 | 0.2048 | 0.02560 | 95% | torch 7.62 | 9.52 |",
    ]


def test_what_cannot_run_has_no_column_and_one_line():
    records = make_records({"warploom": 2.0, "torch": 8.0, "cudnn": 1.0, "flex": 1.0}, activations=("none",))
    records = [
        replace(r, status="unsupported", reason="needs a GPU", ms=None) if r.provider in ("cudnn", "flex") else r
        for r in records
    ]
    table = make_tables(records)[0]
    assert {"cudnn", "flex"}.isdisjoint(table.heads)
    assert table.notes == ["unsupported: cudnn, flex: needs a GPU"]


def test_a_wide_table_is_parted_and_a_long_head_fold():
    table = Table.of(["n", *(f"provider_number_{i}" for i in range(12))], [["1", *["0.12345"] * 12]])
    plain = render_text([table], 80)
    assert all(len(line) <= 80 for line in plain.splitlines())
    assert plain.count("0.12345") == 12
    assert Table(["a", "b"], [[Cell("1"), Cell("")]]).drop_empty_columns().heads == ["a"]


def test_a_late_sample_is_marked():
    records = make_records({"warploom": 2.0}, activations=("none",))
    fail(records, "warploom", "fwd", 256, late=3, rounds=20)
    table = make_tables(records)[0]
    assert table.rows[0][1].text.endswith("†")
    assert table.rows[0][1].reason == "the host was not ahead in 3 of 20 rounds"
    assert not table.rows[1][1].text.endswith("†")
    assert table.notes == ["† the host was not always ahead of the device"]


def test_level_cases_have_their_ratio_and_what_is_nominally_slower():
    records = make_records({"warploom": 2.0, "torch": 1.95, "other": 2.06}, activations=("none",))
    fail(records, "torch", "fwd", 256, status="error", reason="out", ms=None)
    (row,) = make_overview(arrange(records)).rows
    assert "level in 6 (0.97 to 1.03; 5 nominally slower)" in row.sentence
    assert row.note == "Cases with each of the others: other 6, torch 5."
    assert only(records).level_told == "3 (2: 0.97)"
    assert only(records, "bwd").level_told == "3 (3: 0.97)"


def test_who_was_not_there_is_named_with_the_reason():
    records = make_records({"warploom": 2.0, "torch": 8.0, "other": 3.0}, activations=("none",))
    fail(records, "other", "fwd", 256, status="unsupported", reason="not installed", ms=None)
    fail(records, "other", "fwd", 4096, run="another")
    fail(records, "torch", "fwd", 1024, status="oom", reason="40 GiB", ms=None)
    found = only(records)
    assert found.peers == {"torch": 2, "other": 1}
    assert found.absent["other"]["timed in another run"] == 1
    assert found.absent["other"]["not installed"] == found.absent["torch"]["40 GiB"] == 1
    assert found.absent["torch_compile"] == {"not in these runs": len(SIZES)}
    assert "warploom" not in found.absent


def test_a_disturbed_time_is_no_share_of_the_limit():
    records = make_records({"warploom": 2.0}, activations=("none",))
    fail(records, "warploom", "fwd", 256, disturbed="hot", limit_fraction=0.1)
    assert only(records).shares == [0.5, 0.5]
    assert "50\N{NO-BREAK SPACE}% of the limit" in make_overview(arrange(records)).rows[0].sentence


def test_short_times_on_a_host_of_many_cores_are_marked(tmp_path):
    records = make_records({"warploom": 1.05}, activations=("none",))
    for cores, few in (({"cpu_cores": 32}, False), ({"cpu_cores": 16}, True), ({"host_cores": 16}, True)):
        found = mark_large_hosts(records, {"here": GPU | {"device": "cuda"} | cores})
        short = [record.ms < 0.1 for record in records]
        assert any(short)
        assert [bool(record.details) for record in found] == [value and not few for value in short]
    bound = {"device": "cuda", "cpu_cores": 16, "host_cores": 32}
    (section,) = load_sections([save(tmp_path / "run", records, GPU | bound)])
    table = make_time_table(section, section.panels[0], "fwd")
    assert [row[1].text.endswith("¹") for row in table.rows] == [256 * 1.05e-4 < 0.1, 1024 * 1.05e-4 < 0.1, False]
    assert table.notes == ["¹ on a host with more than 16 cores, which adds about 1.7 µs"]


# Charts


def test_a_chart_is_valid_small_and_shows_what_was_measured(measured):
    (section,) = load_sections([measured])
    styles = choose_looks(sorted(section.providers), section.emphasis)
    for panel in section.panels:
        for mode in panel.modes:
            charts = make_charts(section, panel, mode)
            assert [chart.unit for chart in charts] == ["s", "share", "MiB"]
            for chart in charts:
                svg = render_chart(chart, styles, {name: i for i, name in enumerate(section.providers)})
                root = ElementTree.fromstring(svg)
                shown = [name for name, line in chart.lines.items() if any(line.values())]
                lines = [g for g in root if g.tag.endswith("}g")]
                assert len(lines) == len(shown)
                assert len({g.get("class") for g in lines}) == len(lines)
                assert len(svg) < 6000
                for x, y in re.findall(r"[ML](-?\d+) (-?\d+)", svg):
                    assert -5 <= int(x) <= 465
                    assert -5 <= int(y) <= 255
    fwd = make_charts(section, section.panels[0], "fwd")[0]
    assert fwd.lines["torch"].get(4096) is None  # it ran out of memory
    assert fwd.lines["warploom"][256] == pytest.approx(256e-7 * 1.05)


def test_a_single_case_has_bars(tmp_path: Path):
    records = [
        r for r in make_records({"warploom": 1.0, "torch": 8.0}, activations=("none",)) if r.case["n"] == 256
    ]
    (section,) = load_sections([save(tmp_path / "run", records, GPU)])
    styles = choose_looks(sorted(section.providers), section.emphasis)
    time, share, memory = (render_chart(c, styles) for c in make_charts(section, section.panels[0], "fwd"))
    widths = [int(width) for width in re.findall(r'width="(\d+)" height="\d+" fill', time)]
    assert widths == [28, 227, 28]  # ours first, then torch, whose 80th percentile is at the end, and the limit
    assert all(words in time for words in ("n = 256", ">warploom<", ">25.6 µs<", ">204.8 µs<"))
    assert ">12%<" in share
    assert ">32 MiB<" in memory


def test_memory_is_drawn_between_powers_of_two():
    chart = Chart("memory", [1, 2], "n", {"torch": {1: 100.0, 2: 3000.0}}, {}, "MiB")
    labels = re.findall(r">([^<]+ [MG]iB)<", render_chart(chart, choose_looks(["torch"], "")))
    assert labels == ["64 MiB", "128 MiB", "256 MiB", "512 MiB", "1 GiB", "2 GiB", "4 GiB"]


def test_a_case_of_several_runs_has_a_history(tmp_path: Path):
    first = make_records({"warploom": 2.0, "torch": 8.0}, activations=("none",))
    second = [replace(record, ms=(record.ms or 0) / 2, run="s") for record in first]
    folder = save(tmp_path / "run", first, {**GPU, "started": "2026-11-25T21:31:52+00:00"})
    append(folder, second)
    save_environment(folder, "here", {**GPU, "started": "2026-11-24T21:31:52+00:00", "commit": "feed" * 10}, "s")
    page = page_of(folder)
    words = body_text(page)
    assert "History: 2 runs" in words
    heads = "run commit ms at n = 256 ms at n = 1024 ms at n = 4096"
    assert f"{heads} 11-24 21:31:52 feedfeedfe 0.02560 0.1024 0.4096 11-25" in words
    past = page[page.index('class="past"') :]
    assert "time in each run, over that in the first" in past
    assert 'data-x="' in past
    assert "History" not in body_text(page_of(save(tmp_path / "other", first, GPU)))


def test_a_line_and_its_band_have_gaps_where_there_is_no_speed():
    values = {1: 1e-3, 2: 2e-3, 3: None, 4: 4e-3, 5: 5e-3}
    edges = tuple({x: y and y * factor for x, y in values.items()} for factor in (0.9, 1.1))
    chart = Chart("time", list(values), "n", {"torch": values}, {"torch": edges})
    root = ElementTree.fromstring(render_chart(chart, choose_looks(["torch"], "")))
    (group,) = (g for g in root if g.tag.endswith("}g"))
    band, line, _ = (path.get("d") for path in group)
    assert (line.count("M"), line.count("L")) == (2, 2)
    assert (band.count("M"), band.count("L"), band.count("z")) == (2, 6, 2)


def test_a_band_far_above_its_line_stays_below_the_title():
    values = {1: 1e-3, 2: 2e-3}
    edges = (values, {x: 20 * y for x, y in values.items()})
    svg = render_chart(
        Chart("time", list(values), "n", {"torch": values}, {"torch": edges}), choose_looks(["torch"], "")
    )
    assert min(int(y) for _, y in re.findall(r"[ML](-?\d+) (-?\d+)", svg)) >= TOP


def test_a_provider_keeps_its_look():
    names = ["torch", "warploom", "sdpa", "warploom+compile", "sdpa+compile", "other", LIMIT]
    first, second = choose_looks(names, "warploom"), choose_looks([*reversed(names[3:]), *names[:3]], "torch")
    for name in ("torch", "warploom", LIMIT, "warploom+compile"):
        assert first[name].colour == second[name].colour
    assert first["sdpa"].colour == first["sdpa+compile"].colour
    assert first["sdpa"].marker != first["sdpa+compile"].marker
    assert first["warploom"].width > first["torch"].width


# The page


def test_report_is_one_file_that_loads_nothing(measured):
    output = measured / "new" / "report.html"
    assert write_report([measured], output) == output
    own = output.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://", own)
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|@import|url\(", own)
    assert not re.search(r"<script[^>]*\ssrc", own)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', own))


def test_report_shows_the_summary_first_then_panels_tables_and_commands(measured):
    page = page_of(measured)
    words = body_text(page)
    assert words.index("fastest alternative") < words.index("A rotation")
    assert "NVIDIA H200" in words
    assert "commit 0123456789abcdef;" in words
    assert "warploom bench lrpe-rotate --suite published --case activation=silu --mode bwd" in words
    assert "Every case: batch = 12, heads = 12, head_dim = 128, dtype = bfloat16" in words
    assert re.search(r"n warploom torch_compile torch warploom_variant limit of the limit", words)
    assert "0.25" in words  # accuracy over its budget
    assert "lrpe_rotate H200 fwd n=256 activation=none 0.02688 95% torch 0.2048 7.62 faster" in words
    assert "Not counted: 2 incorrect, 2 measured with earlier code." in words
    assert "60 records" in words
    for panel in re.findall(r"data-values='([^']*)'", page):
        assert set(json.loads(panel)) == {"activation", "mode"}
    assert page.count('class="panel chosen"') == 1


def test_what_failed_has_a_badge_and_a_reason_but_no_speed(measured):
    page = page_of(measured)
    words = body_text(page)
    for state in ("incorrect", "oom", "unsupported", "error", "stale"):
        assert f'class="badge {state}"' in page
    assert "oom torch at n = 4096: CUDA out of memory" in words
    assert "unsupported warploom_variant at n = 256: no table here" in words
    assert "stale warploom at n = 4096: measured with other code" in words
    assert "0.000123" not in words
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "over the budget &lt;b&gt;&amp;" in page


def test_wrong_results_are_named_by_provider_and_those_of_peers_are_no_alarm(tmp_path: Path):
    records = make_records({"warploom": 2.0, "torch": 8.0}, activations=("none",))
    fail(records, "torch", "fwd", 256, status="incorrect", reason="0.3 over the budget", ms=None)
    page = page_of(save(tmp_path / "run", records, GPU))
    assert '<span class="badge incorrect peer">1 incorrect: torch 1</span>' in page
    explained = page.count('class="badge incorrect"')
    assert explained == 1  # where badges are explained
    fail(records, "warploom", "fwd", 256, status="incorrect", reason="0.3 over the budget", ms=None)
    page = page_of(save(tmp_path / "other", records, GPU))
    assert '<span class="badge incorrect">1 incorrect: warploom 1</span>' in page


def test_a_disturbed_speed_is_shown_and_marked(tmp_path):
    records = make_records({"warploom": 1.05, "torch": 8.0}, activations=("none",))
    hot = [replace(r, disturbed="thermal slowdown") if r.case["n"] == 1024 else r for r in records]
    words = body_text(page_of(save(tmp_path / "run", hot, GPU)))
    assert "1024 0.1075 disturbed 0.8192 disturbed" in words
    assert "disturbed warploom at n = 1024: thermal slowdown" in words
    assert "Not counted: 2 disturbed." in words


def test_the_commits_shown_are_those_of_runs_with_records(tmp_path):
    save_environment(tmp_path, "here", {**GPU, "commit": "fedcba9876543210", "dirty": True}, "another")
    words = body_text(page_of(save(tmp_path, make_records({"warploom": 1.05}), GPU)))
    assert "commit 0123456789" in words
    assert "with changes" not in words


def test_several_environments_and_runs_are_a_warning(tmp_path, measured):
    assert 'class="warning"' not in page_of(measured)
    other = make_records({"warploom": 2.0}, "there")
    folder = save(tmp_path / "b", [replace(r, run="s") for r in other], {**GPU, "gpu": "NVIDIA A100"}, "there")
    words = body_text(page_of(measured, folder))
    assert "The records are of 2 environments" in words
    assert "The times are of 2 runs" in words
    labels = [panel.label for panel in load_sections([measured, folder])[0].panels]
    assert labels == [
        "activation = none · device = NVIDIA H200",
        "activation = silu · device = NVIDIA H200",
        "activation = none · device = NVIDIA A100",
        "activation = silu · device = NVIDIA A100",
    ]


def test_report_without_a_gpu_is_about_torch(tmp_path):
    records = make_records({"torch": 3.0, "torch_compile": 2.0})
    records = [replace(record, peak_memory_mib=None) for record in records]
    words = body_text(page_of(save(tmp_path / "cpu", records, CPU)))
    assert "A plain CPU" in words
    assert "torch_compile 0.05120 0.67 slower" in words
    assert "fastest other / torch" in words
    assert "PyTorch's definition" in words
    assert "No kernel of warploom ran here: without an NVIDIA GPU it computes in PyTorch." in words
    assert "ours" not in words
    assert "Peak memory" not in words


def test_a_grid_that_the_tokens_determine_makes_no_panels(tmp_path):
    records = []
    for record in make_records({"warploom": 2.0}, activations=("none",)):
        for dims in (1, 2):
            grid = [record.case["n"]] if dims == 1 else [int(record.case["n"] ** 0.5)] * 2
            case = {**record.case, "grid_dims": dims, "grid": grid, "prefix": 0}
            records.append(replace(record, operator="lrpe_cosine_md", case=case))
    (section,) = load_sections([save(tmp_path / "run", records, GPU)])
    assert section.choices == {"grid_dims": ["1", "2"]}
    assert section.constants == {**SHAPE, "activation": "none", "prefix": 0}
    assert section.panels[1].xs("fwd") == list(SIZES)


def test_a_later_record_replaces_an_earlier_one_but_no_stale_one_a_fresh_one(tmp_path):
    first = make_records({"warploom": 2.0}, activations=("none",))
    second = [replace(record, ms=(record.ms or 0) / 2) for record in first]
    stale = [replace(record, fingerprint="other", ms=1e-6) for record in first]
    folders = [save(tmp_path / str(i), records, GPU) for i, records in enumerate((first, second, stale))]
    (section,) = load_sections(folders)
    assert {point.ms for point in section.points} == {record.ms for record in second}


def test_a_bench_that_the_registry_does_not_know_is_stale(tmp_path):
    records = [replace(record, operator="gone") for record in make_records({"warploom": 2.0})]
    (section,) = load_sections([save(tmp_path / "run", records, GPU)])
    assert {point.state for point in section.points} == {"stale"}
    assert "No provider has a speed here" in body_text(page_of(tmp_path / "run"))


def test_nothing_measured_says_so(tmp_path):
    append(tmp_path / "run", [])
    assert "No records in" in body_text(page_of(tmp_path / "run"))
    with pytest.raises(WarploomError, match="no records here"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


# Published figures


def test_published_figures():
    rows = read_published()
    assert {row.metric for row in rows} == {"speed", "memory"}
    assert all(row.value is None or row.value > 0 for row in rows)
    case = {**SHAPE, "activation": "none", "n": 256}
    found = [row for row in rows if row.matches("lrpe_rotate", "fwd", case) and row.metric == "speed"]
    times = {(row.gpu, row.provider): row.value for row in found}
    assert times[("H100", "triton")] == pytest.approx(0.045846)
    assert len(times) == 6
    assert not [row for row in rows if row.matches("lrpe_rotate", "fwd", {**case, "dtype": "float32"})]
    case = {**SHAPE, "activation": "none", "grid_dims": 2, "prefix": 10, "n": 16**2 + 10}
    assert len({row.provider for row in rows if row.matches("lrpe_cosine_md", "bwd", case)}) == 4
    alone = {"batch": 8, "heads": 1, "dtype": "float32", "causal": False, "head_dim": 16, "n": 16384}
    out_of_memory = [row for row in rows if row.matches("flash_attention", "fwd", alone)]
    assert out_of_memory
    assert all(row.value is None and row.told == "OOM" for row in out_of_memory)
    assert {row.told for row in rows if row.value is None} == {"OOM", "-1"}
    assert sum(row.told == "-1" for row in rows if row.metric == "speed") == 32
    steps = {(row.case["size"], row.mode): row.value for row in rows if row.operator == "transformer"}
    assert steps[("sm", "fwd")] == pytest.approx(22.7895)
    assert steps[("sm", "fwd_bwd")] == pytest.approx(64.5101)
    assert len(list(FOLDER.glob("*.csv"))) == 7


def test_published_figures_stand_apart_from_what_was_measured(measured):
    words = body_text(page_of(measured))
    found = re.search(
        r"Published by others on their GPUs, and measured here: no comparison \(ms\) (n .*?) 256 ", words
    )
    assert found
    assert "triton (H100)" in found[1]
    assert re.search(r"warploom \([^)]+\)", found[1])
    assert "Published by others, and measured here: peak memory (MiB)" in words


@pytest.mark.usefixtures("own_registry")
def test_the_suite_of_published_cases_has_every_published_row():
    load_specs([Path(__file__).parents[1] / "benchmarks"])
    found = list_published_cases()
    assert len(found) == 415
    shown = {id(row) for published in found for row in published.figures}
    assert not [row for row in read_published() if id(row) not in shown]
