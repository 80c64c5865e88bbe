"""The tables of README and documentation come from the committed records."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import texts
from diagrams import DIAGRAMS
from overview import draw_overview
from test_report import GPU, make_records

from warploom.bench.records import Record, append, save_environment
from warploom.errors import ArgumentError
from warploom.ops import benches
from warploom.report import write_report
from warploom.report.panels import arrange
from warploom.testing.specs import load_specs

ROOT = Path(__file__).parents[1]
DEVICES = {"here": str(GPU["gpu"]), "there": "NVIDIA H100 80GB HBM3"}


@pytest.fixture(autouse=True)
def _models(own_registry: None) -> None:
    load_specs([ROOT / "benchmarks"])


def test_the_tables_are_what_the_records_say(tmp_path: Path) -> None:
    for name in texts.TEXTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    # In the interpreter nothing is known of what is stale.
    environment = processes.environment(ROOT / "tools")
    environment.pop("TRITON_INTERPRET", None)
    program = "import sys, texts; from pathlib import Path; texts.ROOT = Path(sys.argv[1])\n"
    program += "texts.replace_text = lambda path, text: path.suffix == '.md' and path.write_text(text)\n"
    program += "texts.main([*map(Path, sys.argv[2:])])"
    folders = [str(ROOT / "results" / name) for name in ("h200", "h100")]
    words = [sys.executable, "-c", program, str(tmp_path), *folders]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in texts.TEXTS:
        assert (tmp_path / name).read_text(encoding="utf-8") == (ROOT / name).read_text(encoding="utf-8"), name


def fresh(records):
    """As if they were of the present code."""
    return [replace(record, fingerprint="") for record in records]


@pytest.mark.parametrize("lost", [False, True])
def test_a_headline_includes_what_is_lost(lost: bool) -> None:
    case = {"theta": "vector"}
    records = [
        replace(r, operator="lrpe_rope", case={**r.case, **case})
        for r in make_records({"warploom": 2.0, "torch": 8.0, "liger": 1.9 if lost else 2.5}, activations=("none",))
    ]
    table = texts.speed_table(fresh(records), DEVICES).splitlines()
    (row,) = [line for line in table if line.startswith("| RoPE")]
    words = [cell.strip() for cell in row.split("|")[1:-1]]
    ratio, counts = ("0.95 (0.95 … 0.95)", "0 / 3 (3: 0.95) / 3") if lost else ("1.25 (1.25 … 1.25)", "0 / 0 / 3")
    assert words[3:] == ["H200", "0.8192", "50 %", "liger", ratio, counts, "3 / 8"]


def test_disturbed_cases_are_shown_and_count_in_nothing() -> None:
    made = fresh(make_records({"warploom": 2.0, "torch": 8.0}, activations=("none",)))
    records = [
        replace(r, operator="lrpe_rope", case={**r.case, "theta": "vector"}, limit_fraction=0.1, disturbed="hot")
        if r.case["n"] == 4096
        else replace(r, operator="lrpe_rope", case={**r.case, "theta": "vector"})
        for r in made
    ]
    (row,) = [line for line in texts.speed_table(records, DEVICES).splitlines() if line.startswith("| RoPE")]
    assert [cell.strip() for cell in row.split("|")[5:-1]] == [
        "0.8192\\*", "10 %", "torch", "4.00 (4.00 … 4.00)", "0 / 0 / 2", "3 / 8, 1 disturbed",
    ]  # fmt: skip
    (whole,) = [
        line for line in texts.whole_tables(records, DEVICES).splitlines() if line.startswith("| all cases | fwd")
    ]
    assert "| 0.8192\\* | 50 % (50 % … 50 %) |" in whole


def test_the_peers_of_each_row_are_named_and_so_is_who_was_not_there() -> None:
    made = make_records({"warploom": 2.0, "torch": 8.0, "liger": 2.5}, activations=("none",))
    told = {"status": "unsupported", "reason": "liger_kernel is not installed", "ms": None}
    records = [
        replace(
            r, operator="lrpe_rope", case={**r.case, "theta": "vector"}, **told if r.provider == "liger" else {}
        )
        for r in fresh(made)
    ]
    line, *more = texts.speed_peers(records, DEVICES).splitlines()
    assert line.startswith("- **RoPE, fwd, H200.** Of 3 cases timed beside ours: `torch` 3; ")
    assert "; liger\\_kernel is not installed: `liger` 3" in line
    assert "; not in these runs: `torch_compile` 3" in line
    assert not more
    assert "Of 6 cases timed beside ours: `torch` 6; " in texts.whole_tables(records, DEVICES)


def test_guides_show_rates_ratios_and_what_is_below_its_target() -> None:
    made = make_records({"warploom": 2.0, "torch": 8.0, "liger": 1.9}, activations=("none",))
    records = fresh([replace(r, flops=10**12) for r in made])
    ratios = texts.grid("lrpe_rotate", {"activation": "none"}, ("published",), texts.ratio, records, DEVICES)
    rates = texts.grid("lrpe_rotate", {}, ("published",), texts.rate, records, DEVICES)
    ours = [r for r in records if r.provider == "warploom" and r.mode == "fwd"]
    assert ratios.splitlines()[2].count("0.95 / ") == len(ours) == 3
    assert all(f" {1000 / r.ms:.0f} / {1000 / r.ms:.0f} |" in rates for r in ours)
    assert (
        texts.grid("lrpe_rotate", {"activation": "silu"}, ("published",), texts.rate, records, DEVICES)
        == texts.NOTHING
    )
    below = texts.below_target(records, DEVICES)
    assert "| Forward | H200 | 3 / 3 | 50 % |" in below
    assert texts.guide_table("lrpe", records, DEVICES).count("| liger |") == len({r.mode for r in records})


def test_the_largest_case_is_shown_whenever_it_was_measured() -> None:
    records = fresh(make_records({"warploom": 2.0, "torch": 8.0}, activations=("none",)))
    tables = [texts.whole_tables(each, DEVICES).splitlines() for each in (records, records[::-1])]
    rows = [{line for line in table if line.startswith("| all cases | fwd | ")} for table in tables]
    assert rows[0] == rows[1] != set()


def test_no_records_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "RESULTS", tmp_path)
    for write in texts.TABLES.values():
        assert "no records" in write([], {})


def test_a_row_says_how_many_cases_the_suites_have() -> None:
    records = make_records({"warploom": 2.0, "liger": 4.0}, activations=("none",))
    (row,) = [line for line in texts.guide_table("lrpe", fresh(records), DEVICES).splitlines() if "Forward" in line]
    suites = benches()["lrpe-rotate"].suites
    cases = [case for name in ("published", "theta", "seeds") for case in suites[name]("cuda")]
    assert row.endswith(f"| 3 / {len({json.dumps(dict(case), sort_keys=True) for case in cases})} |")
    (section,) = arrange(fresh(records), DEVICES)
    lines = texts.whole_tables(fresh(records), DEVICES).splitlines()
    assert sum(line.endswith("| 3 / 8 |") for line in lines) == len(section.panels) * 2


def test_published_rows_stand_beside_our_records() -> None:
    records = make_records({"warploom": 2.0, "torch": 3.0}, activations=("none",))
    told, *parts = texts.published_tables(fresh(records), DEVICES).split("\n\n")
    sizes = {r.case["n"] for r in records if r.provider == "warploom" and 2**8 <= r.case["n"] <= 2**15}
    modes = {r.mode for r in records}
    assert told.startswith(f"Of 415 published rows the present code has records of {len(sizes) * len(modes)} on ")
    table = parts[parts.index("## LRPE rotate, H100") + 1].splitlines()
    cells = {tuple(cell.strip() for cell in line.split("|")[1:4]): line.split("|")[4:-1] for line in table[2:]}
    assert len(cells) == 64
    measured = [values for values in cells.values() if values[-2].strip() != "–"]
    assert len(measured) == len(sizes) * len(modes)
    assert float(cells["none", "4k", "fwd"][0]) == 0.3610


def on_two_gpus() -> list[Record]:
    """All sizes on the second GPU, all but the typical one on the first, with other ratios."""
    first = make_records({"warploom": 2.0, "liger": 4.0}, activations=("none",))
    second = make_records({"warploom": 2.0, "liger": 6.0}, "there", activations=("none",))
    return fresh([*(r for r in first if r.case["n"] != 4096), *second])


def test_each_row_is_of_one_gpu() -> None:
    records = on_two_gpus()
    table = texts.guide_table("lrpe", records, DEVICES)
    assert [line.split(" | ")[1:3] for line in table.splitlines()[2:]] == [
        ["Forward", "H200"], ["Backward", "H200"], ["Forward", "H100"], ["Backward", "H100"],
    ]  # fmt: skip
    assert table.count("| 2.00 (2.00 … 2.00) | 0 / 0 / 2 | 2 / 64 |") == 2
    assert table.count("| 3.00 (3.00 … 3.00) | 0 / 0 / 3 | 3 / 64 |") == 2
    below = texts.below_target(records, DEVICES)
    assert all(f"| Forward | {gpu} | {count} / {count} |" in below for gpu, count in (("H200", 2), ("H100", 3)))
    whole, elsewhere = texts.whole_tables(records, DEVICES), texts.elsewhere_tables(records, DEVICES)
    assert whole.startswith("## LRPE rotate, NVIDIA H200\n")
    assert elsewhere.startswith("### LRPE rotate, NVIDIA H100 80GB HBM3\n")
    assert all("2.00 (2.00" in line for line in whole.splitlines() if "| all cases |" in line)
    assert all("3.00 (3.00" in line for line in elsewhere.splitlines() if "| all cases |" in line)


def test_the_menu_leads_to_each_table() -> None:
    records = on_two_gpus()
    menu = texts.menu(records, DEVICES)
    anchors = ("lrpe-rotate-nvidia-h200", "lrpe-rotate-nvidia-h100-80gb-hbm3")
    assert cells_of(menu) == [["LRPE rotate", "`lrpe_rotate`", *(f"[{n}](#{a})" for n, a in zip((4, 6), anchors))]]
    tables = texts.whole_tables(records, DEVICES) + texts.elsewhere_tables(records, DEVICES)
    for heading in (line.lstrip("# ") for line in tables.splitlines() if line.startswith("##")):
        assert f"(#{re.sub('[^a-z0-9-]', '', heading.lower().replace(' ', '-'))})" in menu


def test_a_row_of_the_readme_and_a_picture_are_of_the_first_gpu_with_the_typical_case() -> None:
    case = {"theta": "vector"}
    both = [replace(r, operator="lrpe_rope", case=r.case | case) for r in on_two_gpus()]
    first, second = ([r for r in both if r.environment == name] for name in ("here", "there"))
    for records, gpu, pictures in (
        (both, "H100", (0, 1)),
        (second + first, "H100", (1, 0)),
        (first, "H200", (1, 0)),
    ):
        (row,) = [line for line in texts.speed_table(records, DEVICES).splitlines() if line.startswith("| RoPE")]
        assert f"| fwd | {gpu} |" in row
        tables = (texts.whole_tables(records, DEVICES), texts.elsewhere_tables(records, DEVICES))
        assert tuple(table.count("figures/lrpe_rope.svg") for table in tables) == pictures
    complete = [replace(r, environment="here") for r in second] + second
    assert "| fwd | H200 |" in texts.speed_table(complete, DEVICES)


def test_the_picture_of_a_bench_without_a_row_is_of_the_first_gpu_with_what_is_shown() -> None:
    other = {"activation": "softmax_sequence"}
    made = make_records({"warploom": 2.0}, activations=("none",))
    records = [replace(r, operator="lrpe_rotate_md") for r in made]
    first, second = (
        [replace(r, case=r.case | other) for r in records],
        [replace(r, environment="there") for r in records],
    )
    assert {r.environment for r in texts.pictured(first + second, DEVICES)} == {"there"}
    assert {r.environment for r in texts.pictured(records + second, DEVICES)} == {"here"}


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_every_case_of_a_server_s_benches_is_a_row() -> None:
    """With the words of its batch; peers, and the time of bits that do not depend on chunks, beside ours."""
    cases = [
        *((name, "fwd", case) for name in ("attention-serving", "append-kv", "attention-decode")
        for suite, cases in benches()[name].suites.items() if suite != "quick" for case in cases("cuda")),
        ("llama", "serve", {"size": "8B", "layers": 4, "batch": 1, "dtype": "bfloat16", "context_length": 4096}),
    ]  # fmt: skip
    records = []
    for name, mode, case in cases:
        ours = Record(name.replace("-", "_"), "published", dict(case), "warploom", mode, "", "here", "r", ms=2.0)
        ours = replace(ours, limit_ms=1.0, limit_fraction=0.5, details={"tokens_per_second": 1000.0})
        records += [ours, replace(ours, provider="limit", ms=1.0), replace(ours, provider="sdpa", ms=3.0)]
        if name == "attention-serving":
            records.append(replace(ours, provider="warploom_chunks", ms=5.0))
    rows = cells_of(texts.serving_table(records, DEVICES))
    assert len(rows) == len(cases)
    assert len({(row[0], row[1]) for row in rows}) == len(cases)
    assert all(row[2:-1] == ["H200", "2.000", "50 %", "sdpa", "1.50"] for row in rows)
    found = {(row[0], row[1]): row[-1] for row in rows}
    for batch, ratio in (
        (("attention of a batch", "64 decoding at 2k, pages of 64, 128:1 heads, latent"), "2.50"),
        (("attention of a batch", "prompt of 8k, 32:8 heads"), "2.50"),
        (("a step of decoding", "8 × 8k, pages, 32:8 heads"), ""),
        (("rotation and appending", "8255 tokens of 64 sequences"), ""),
        (("requests to a model of transformers", "prompts of up to 4096 tokens, 1000 tokens a second"), ""),
    ):
        assert found[batch] == ratio
    some = texts.serving_table([r for r in records if r.operator != "append_kv"], DEVICES)
    assert some.endswith("There are no records of the present code yet of rotation and appending (`append-kv`).")


def test_calls_over_gpus_are_beside_one_gpu() -> None:
    same = {"out": True, "dq": False, "dk": False}
    records = []
    for environment in ("here", "there"):
        for kind, gpus, n, mode, ms in (
            ("linear", 2, 64, "fwd", 10.0),
            ("causal", 2, 128, "fwd", 10.0),
            ("causal", 4, 64, "fwd_bwd", 9.0),
            ("causal", 4, 64, "fwd", 10.0),
            ("causal", 2, 64, "fwd_bwd", 9.99),
        ):
            case = {"kind": kind, "gpus": gpus, "n": n}
            bits = {"bits_of_one_gpu": same if mode == "fwd_bwd" else {"out": True}}
            ours = Record("context_parallel", "published", case, "warploom", mode, "", environment, "r", ms=10.0)
            records.append(replace(ours, limit_ms=ms, limit_fraction=ms / 10, details=bits))
            records.append(replace(ours, provider="limit", ms=ms))
            if gpus == 4:
                records += [
                    replace(ours, provider=name, ms=took) for name, took in (("slow", 30.0), ("fast", 20.0))
                ]
    none, both = ["none in the same run", ""], "Forward and backward"
    wanted = []
    for kind, mode, gpus, tokens, rest in (
        ("causal attention", both, "2", "64", ["9.990", "10.00", "0.99", *none, "out, not dq"]),
        ("causal attention", "Forward", "4", "64", ["10.00", "10.00", "1.00", "fast", "20.00", "out"]),
        ("causal attention", both, "4", "64", ["9.000", "10.00", "0.90", "fast", "20.00", "out, not dq"]),
        ("causal attention", "Forward", "2", "128", ["10.00", "10.00", "1.00", *none, "out"]),
        ("linear attention", "Forward", "2", "64", ["10.00", "10.00", "1.00", *none, "out"]),
    ):
        wanted += [[kind, mode, gpu, gpus, tokens, *rest] for gpu in ("H200", "H100")]
    assert cells_of(texts.context_table(records, DEVICES)) == wanted


def test_training_steps_are_those_after_warming_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "RESULTS", tmp_path)
    for name, rates in (
        ("h100/training/lg-1x2000x4", (1, 1000, 4000, 2000)),
        ("h100/training/lg-2x500x4", (9000, 1000)),
        ("h200/training/lg-1x2000x4", (1, 4000)),
        ("h100/training/lg-1x2000x1", (1, 800)),
        ("h100/training/lg-2x2000x1", (1, 100)),
    ):
        entries = [{"step": 3 * i, "loss": i / 8, "tokens_per_s": rate} for i, rate in enumerate(rates, start=1)]
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        entries[-1] |= {"held_out_loss": 1.5} if "h200" in name else {}
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    more = "3: 0.1250, 6: 0.2500, 9: 0.3750, 12: 0.5000"
    assert cells_of(texts.training_table()) == [
        ["H100", "1", "1", "2000", "2500", "–", "800 (800 … 800)", "3: 0.1250, 6: 0.2500", "–"],
        ["H100", "4", "1", "2000", "1000", "0.62", "2,000 (1,000 … 4,000)", more, "–"],
        ["H200", "4", "1", "2000", "500.0", "–", "4,000 (4,000 … 4,000)", "3: 0.1250, 6: 0.2500", "1.5000"],
        ["H100", "4", "2", "500", "1000", "–", "1,000 (1,000 … 1,000)", "3: 0.1250, 6: 0.2500", "–"],
        ["H100", "1", "2", "2000", "40000", "–", "100 (100 … 100)", "3: 0.1250, 6: 0.2500", "–"],
    ]


def test_records_of_no_clean_commit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "is_stale", False)
    made = make_records({"warploom": 2.0})
    append(tmp_path, [replace(r, run=name) for r, name in zip(made, ("clean", "dirty", "before-0", ""))])
    for run, dirty in (("clean", False), ("dirty", True)):
        save_environment(tmp_path, "here", GPU | {"dirty": dirty}, run)
    records, devices = texts.fresh([tmp_path])
    assert records == [replace(made[0], run="clean")]
    assert devices == {"here": "NVIDIA H200"}


def test_what_was_not_compared_is_said() -> None:
    records = [replace(r, run="", operator="lrpe_rope") for r in make_records({"warploom": 2.0, "torch": 8.0})]
    assert "none in the same run" in texts.speed_table(fresh(records), DEVICES)
    assert "none in the same run" in texts.whole_tables(fresh(records), DEVICES)


def test_a_picture_is_the_same_for_the_same_records() -> None:
    (section,) = arrange(fresh(make_records({"warploom": 1.05, "torch": 8.0})))
    first = texts.draw(section, "H200")
    assert first.startswith("<svg")
    assert first == texts.draw(section, "H200")
    assert "torch" in first
    assert "H200" in first
    (nothing,) = arrange([replace(r, ms=None, status="error") for r in make_records({"warploom": 1.05})])
    assert texts.draw(nothing, "H200") == ""


def test_the_overview_shows_what_is_won_level_and_lost() -> None:
    case = {"theta": "vector"}
    for ours, faster, level, slower in ((2.0, 3, 0, 0), (8.0, 0, 3, 0), (9.5, 0, 0, 3)):
        made = make_records({"warploom": ours, "torch": 8.0}, activations=("none",))
        records = [replace(r, operator="lrpe_rope", case=r.case | case) for r in made if r.mode == "fwd"]
        drawn = draw_overview([(section, "H200") for section in arrange(fresh(records))])
        rows = drawn.partition("RoPE, forward")[2].partition("ours is faster")[0]
        # The legend has one mark of the first kind before its words.
        assert rows.count("<circle") - rows.count('fill="none"') == faster + 1
        assert (rows.count('fill="none"'), rows.count("<path")) == (level, slower)
        assert f">{slower} / 3<" in rows
    assert "RoPE" not in draw_overview([])


def test_diagrams_are_what_the_tool_draws() -> None:
    for name, draw_diagram in DIAGRAMS.items():
        assert (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8") == draw_diagram(), name


def test_every_picture_is_shown_somewhere() -> None:
    pages = [
        page.read_text(encoding="utf-8") for folder in ("docs", "src") for page in (ROOT / folder).rglob("*.md")
    ]
    for picture in (ROOT / "docs" / "figures").iterdir():
        assert any(f"figures/{picture.name})" in page for page in pages), picture.name


def test_a_file_without_marks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.md"
    for content in ("nothing", texts.MARK.format("speeds")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ArgumentError, match="marks"):
            texts.update(file, [], {})
        assert file.read_text(encoding="utf-8") == content


def test_the_report_of_all_committed_records_is_small_and_folded(tmp_path: Path) -> None:
    folders = [ROOT / "results" / name for name in ("h200", "h100")]
    page = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 2.5e6
    sections = page.split('<section id="')[2:]
    assert len(sections) == len({section.partition('"')[0] for section in sections}) > 5
    for section in sections:  # one panel is seen, and its tables when they are opened
        assert section.count('class="panel chosen"') == 1
        assert section.count("<table") == section.count("</table>") <= section.count("<details") * 5
        assert "<table" not in section.partition("<details")[0]
