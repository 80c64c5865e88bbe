"""The HTML report, the READMEs' pictures, and the published figures they show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as graph_objects
import pytest
import toy
from plotly.offline import get_plotlyjs

from warploom import ops
from warploom.bench import records as records_module
from warploom.bench.fingerprint import fingerprint
from warploom.bench.panels import load_sections
from warploom.bench.published import FOLDER, published
from warploom.bench.readme import speed_table
from warploom.bench.records import LIMIT, Record, append, save_environment
from warploom.bench.report import write_report
from warploom.errors import WarploomError

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
    monkeypatch.setattr(ops, "benches", lambda: {BENCH.name: BENCH})
    monkeypatch.setattr(records_module, "benches", lambda: {BENCH.name: BENCH})


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
    """Turn a provider's records of one size into something that has no speed."""
    for i, record in enumerate(records):
        if (record.provider, record.mode, record.case["n"]) == (provider, mode, n):
            records[i] = replace(record, **changes)


def save(folder: Path, records: list[Record], environment: dict[str, object], name: str = "here") -> Path:
    append(folder, records)
    save_environment(folder, name, environment)
    return folder


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    records = make_records({"triton": 1.05, "triton_cache": 1.5, "torch": 8.0, "torch_compile": 4.0})
    nothing = {"ms": None, "limit_fraction": None}
    fail(records, "triton", "bwd", 1024, status="incorrect", reason="0.31 over the budget <b>&", **nothing)
    fail(records, "torch", "fwd", 4096, status="oom", reason="CUDA out of memory", **nothing)
    fail(records, "triton_cache", "bwd", 256, status="unsupported", reason="no table here", **nothing)
    fail(records, "torch_compile", "fwd", 256, status="error", reason="<script>alert(1)</script>", **nothing)
    fail(records, "triton", "fwd", 4096, fingerprint="of earlier code", ms=0.000123)
    return save(tmp_path / "run", records, GPU)


def page_of(*sources: Path) -> str:
    """The report without plotly's own code."""
    text = write_report(sources, sources[0] / "report.html").read_text(encoding="utf-8")
    return text.replace(get_plotlyjs(), "")


def figures_of(page: str) -> dict[str, dict]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def body_text(page: str) -> str:
    """What a reader sees, with single spaces."""

    class Text(HTMLParser):
        words: list[str] = []  # noqa: RUF012
        quiet = False

        def handle_starttag(self, tag, attrs):
            self.quiet = tag in ("script", "style")

        def handle_endtag(self, tag):
            self.quiet = False

        def handle_data(self, data):
            if not self.quiet:
                self.words.append(data)

    parser = Text()
    parser.words = []
    parser.feed(page)
    return " ".join(" ".join(parser.words).split())


def test_report_is_one_file_that_loads_nothing(measured):
    output = measured / "new" / "report.html"
    assert write_report([measured], output) == output
    text = output.read_text(encoding="utf-8")
    assert text.count(get_plotlyjs()) == 1
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"https?://", own)
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|@import|url\(", own)
    assert not re.search(r"<script[^>]*\ssrc", own)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', own))


def test_report_shows_tables_and_commands(measured):
    page = page_of(measured)
    text = body_text(page)
    assert "NVIDIA H200" in text
    assert "commit 0123456789 " in text
    assert "warploom bench lrpe-rotate --suite published --case activation=silu --mode bwd" in text
    assert "warploom bench lrpe-rotate --suite published --case activation=none --mode fwd" in text
    assert "batch = 12, heads = 12, head_dim = 128, dtype = bfloat16" in text
    assert re.search(
        r"n triton torch_compile torch triton_cache limit triton / limit GB/s 256 0\.02688 −1 error", text
    )
    assert "0.25 4.00e-03 / 1.60e-02" in text  # accuracy
    assert re.search(r"Peak memory \(MiB\) n triton torch_compile torch triton_cache 256 32\.0", text)


def test_other_functions_have_their_bytes_beside_them_and_no_place_in_the_summary(tmp_path, monkeypatch):
    bench = replace(BENCH, others=(toy.make_other(),))
    monkeypatch.setattr(ops, "benches", lambda: {bench.name: bench})
    measured = make_records({"triton": 1.05, "torch": 8.0, "squared": 20.0})
    measured = [
        replace(r, limit_ms=None, limit_fraction=None, min_bytes=10 * r.min_bytes) if r.provider == "squared" else r
        for r in measured
    ]
    page = page_of(save(tmp_path / "run", measured, GPU))
    text = body_text(page)
    assert "Bytes that must be moved (MiB) squared, squared_wrong: other functions" in text
    assert re.search(r"n triton torch squared 256 0\.2 0\.2 2\.4", text)
    summary = body_text(page[page.index('id="summary"') : page.index('id="lrpe_rotate"')])
    assert "7.62×" in summary
    assert "19.05×" not in summary  # 20 / 1.05
    alone = page_of(save(tmp_path / "alone", make_records({"triton": 2.0}), GPU))
    assert "Bytes that must be moved" not in body_text(alone)


def test_summary_is_about_what_has_a_speed(measured):
    page = page_of(measured)
    summary = body_text(page[page.index('id="summary"') : page.index('id="lrpe_rotate"')])
    assert "lrpe_rotate fwd, triton fwd triton 95% 95% n = 256, none 3.81× 7.62× 5.71× 8 µs 4 ok 2 stale" in summary
    assert (
        "lrpe_rotate bwd, triton bwd triton 95% 95% n = 256, none 3.81× 7.62× 3.81× 8 µs 4 ok 2 incorrect"
        in summary
    )
    assert "60 records" in summary


def test_what_failed_has_a_badge_and_a_reason_but_no_speed(measured):
    page = page_of(measured)
    text = body_text(page)
    for state in ("incorrect", "oom", "unsupported", "error", "stale"):
        assert f'class="badge {state}"' in page
        assert f"−1 {state}" in text
    assert "oom torch at n = 4096: CUDA out of memory" in text
    assert "unsupported triton_cache at n = 256: no table here" in text
    assert "stale triton at n = 4096: measured with other code" in text
    assert "0.000123" not in text
    for name, figure in figures_of(page).items():
        for trace in figure["data"]:
            at = dict(zip(trace["x"], trace["y"]))
            if trace["name"] == "triton" and trace["mode"] == "lines+markers":
                assert at[4096 if "-fwd-" in name else 1024] is None
                assert at[256] is not None


def test_a_disturbed_speed_is_shown_and_marked_but_not_quoted(tmp_path):
    records = make_records({"triton": 1.05, "torch": 8.0}, activations=("none",))
    hot = [replace(r, disturbed="thermal slowdown") if r.case["n"] == 1024 else r for r in records]
    text = body_text(page_of(save(tmp_path / "run", hot, GPU)))
    assert "1024 0.1075 disturbed 0.8192 disturbed" in text
    assert "disturbed triton at n = 1024: thermal slowdown" in text
    assert "2 ok 1 disturbed" in text
    assert speed_table([replace(r, disturbed="thermal slowdown") for r in records]) == speed_table([])
    assert "n = 4096" in speed_table(hot)


def test_reasons_are_escaped(measured):
    page = page_of(measured)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "over the budget &lt;b&gt;&amp;" in page


def test_figures_are_valid_and_complete(measured):
    page = page_of(measured)
    figures = figures_of(page)
    assert set(re.findall(r'data-figure="([^"]*)"', page)) == set(figures)
    assert len(figures) == 2 * 2 * 4  # activations, modes, charts
    for figure in figures.values():
        graph_objects.Figure(figure)  # raises on anything that plotly does not know
    time = next(iter(figures.values()))["data"]
    assert {trace["name"] for trace in time} >= {"triton", "torch", "torch_compile", LIMIT}
    assert any(trace.get("fill") == "toself" for trace in time)
    others = [trace for trace in time if trace["meta"]["published"]]
    assert {trace["name"] for trace in others} >= {"triton (H100, published)", "triton (A100, published)"}
    assert all(trace["visible"] is False and trace["line"]["dash"] != "solid" for trace in others)


def test_a_provider_keeps_its_colour(measured):
    colours: dict[str, set[str]] = {}
    for figure in figures_of(page_of(measured)).values():
        for trace in figure["data"]:
            if "color" in trace["line"]:
                colours.setdefault(trace["name"].split(" ")[0], set()).add(trace["line"]["color"])
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(colours)


def test_report_without_a_gpu_is_about_torch(tmp_path):
    records = make_records({"torch": 3.0, "torch_compile": 2.0})
    records = [replace(record, peak_memory_mib=None) for record in records]
    page = page_of(save(tmp_path / "cpu", records, CPU))
    text = body_text(page)
    assert "A plain CPU" in text
    assert "Share of the limit, torch, by n" in text
    assert "Speed-up of torch over each baseline" in text
    assert "0.67×" in text
    assert "Peak memory" not in text
    assert "triton /" not in text


def test_devices_stand_apart(tmp_path, measured):
    other = save(tmp_path / "b", make_records({"triton": 2.0}, "there"), {**GPU, "gpu": "NVIDIA A100"}, "there")
    sections = load_sections([measured, other])
    labels = [panel.label for panel in sections[0].panels]
    assert labels == [
        "activation = none · device = NVIDIA H200",
        "activation = silu · device = NVIDIA H200",
        "activation = none · device = NVIDIA A100",
        "activation = silu · device = NVIDIA A100",
    ]
    assert "activation = none · device = NVIDIA A100" in body_text(page_of(measured, other))


def test_a_grid_that_the_tokens_determine_makes_no_panels(tmp_path):
    records = []
    for record in make_records({"triton": 2.0}, activations=("none",)):
        for dims in (1, 2):
            grid = [record.case["n"]] if dims == 1 else [int(record.case["n"] ** 0.5)] * 2
            case = {**record.case, "grid_dims": dims, "grid": grid, "prefix": 0}
            records.append(replace(record, operator="lrpe_cosine_md", case=case))
    (section,) = load_sections([save(tmp_path / "run", records, GPU)])
    assert section.choices == {"grid_dims": ["1", "2"]}
    assert section.constants == {**SHAPE, "activation": "none", "prefix": 0}
    assert section.panels[1].xs("fwd") == list(SIZES)


def test_a_later_record_replaces_an_earlier_one_but_no_stale_one_a_fresh_one(tmp_path):
    first = make_records({"triton": 2.0}, activations=("none",))
    second = [replace(record, ms=(record.ms or 0) / 2) for record in first]
    stale = [replace(record, fingerprint="other", ms=1e-6) for record in first]
    folders = [save(tmp_path / str(i), records, GPU) for i, records in enumerate((first, second, stale))]
    (section,) = load_sections(folders)
    assert {point.ms for point in section.points} == {record.ms for record in second}


def test_a_bench_that_the_registry_does_not_know_is_stale(tmp_path):
    records = [replace(record, operator="gone") for record in make_records({"triton": 2.0})]
    (section,) = load_sections([save(tmp_path / "run", records, GPU)])
    assert {point.state for point in section.points} == {"stale"}
    assert "No provider has a speed here" in body_text(page_of(tmp_path / "run"))


def test_nothing_measured_says_so(tmp_path):
    append(tmp_path / "run", [])
    assert "No records in" in body_text(page_of(tmp_path / "run"))
    with pytest.raises(WarploomError, match="no records here"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


def test_pictures(tmp_path, measured):
    pytest.importorskip("matplotlib")
    from warploom.bench.plots import write_pictures

    (picture,) = write_pictures([measured], tmp_path / "pictures")
    assert picture.name == "lrpe_rotate.svg"
    first = picture.read_bytes()
    assert b"</svg>" in first
    write_pictures([measured], tmp_path / "pictures")
    assert picture.read_bytes() == first  # the same records, the same file
    stale = [replace(record, fingerprint="other") for record in make_records({"triton": 2.0})]
    assert write_pictures([save(tmp_path / "stale", stale, GPU)], tmp_path / "none") == []


def test_published_figures():
    rows = published()
    assert {row.operator for row in rows} == {path.stem for path in FOLDER.glob("*.csv")}
    assert {row.metric for row in rows} == {"speed", "memory", "held"}
    assert all(row.value is None or row.value > 0 for row in rows)
    case = {**SHAPE, "activation": "none", "n": 256}
    found = [row for row in rows if row.matches("lrpe_rotate", "fwd", case) and row.metric == "speed"]
    times = {(row.gpu, row.provider): row.value for row in found}
    assert times[("H100", "triton")] == pytest.approx(0.045846)
    assert len(times) == 6
    assert not [row for row in rows if row.matches("lrpe_rotate", "fwd", {**case, "dtype": "float32"})]
    case = {**SHAPE, "activation": "none", "grid_dims": 2, "prefix": 10, "n": 16**2 + 10}
    assert len({row.provider for row in rows if row.matches("lrpe_cosine_md", "bwd", case)}) == 4
    out_of_memory = [row for row in rows if row.operator == "attention" and row.case["n"] == 16384]
    assert out_of_memory
    assert all(row.value is None for row in out_of_memory)
    steps = {(row.case["size"], row.mode): row.value for row in rows if row.operator == "transformer"}
    assert steps[("sm", "fwd")] == pytest.approx(22.7895)
    assert steps[("sm", "fwd_bwd")] == pytest.approx(64.5101)
