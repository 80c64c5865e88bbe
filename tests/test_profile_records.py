"""Recorded profiles: how they are read, and what the report and the texts show of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.bench.readme import BEGIN, END, update
from warploom.bench.records import LIMIT, append, save_environment
from warploom.bench.report import write_report
from warploom.cli import main
from warploom.errors import WarploomError
from warploom.profile.records import PROFILES, ProfileRecord, is_stale, load_profiles, phase
from warploom.profile.sections import profile_sections

PROVIDERS = {"flash": 8.0, "flash+compile": 5.0, "plain": 12.0, "plain+compile": 6.0, "llama": 15.0}


def timed(
    profile: str,
    case: dict[str, object],
    mode: str,
    provider: str,
    phases_ms: dict[str, float] | None,
    **figures: object,
) -> ProfileRecord:
    """A record of a provider; one without times ran out of memory."""
    record = ProfileRecord(profile, case, provider, mode, "here", "", None)
    if phases_ms is None:
        return replace(record, status="oom", reason="CUDA out of memory.")
    return replace(record, phases={name: phase([ms]) for name, ms in phases_ms.items()}, **figures)


def steps(size: str, length: int, step_ms: dict[str, float | None]) -> list[ProfileRecord]:
    """Training steps of several providers."""
    case = {
        "size": size,
        "batch": 4,
        "context_length": length,
        "layers": 2,
        "position": "rotate",
        "dtype": "bfloat16",
    }
    found = []
    for provider, ms in step_ms.items():
        phases = ms and dict.fromkeys(("forward", "backward", "optimizer"), ms / 4) | {"step": ms}
        figures = ms and {"tokens_per_s": 1e3, "peak_memory_mib": 100 * ms, "flops": 1e9, "mfu": 2 / ms}
        found.append(timed("transformer", case, "train", provider, phases, steps=1, **(figures or {})))
    return found


def passes(n: int, forward_ms: dict[str, float | None]) -> list[ProfileRecord]:
    """Attention by itself."""
    case = {"batch": 8, "head_dim": 64, "n": n, "dtype": "float32", "causal": False}
    found = []
    for provider, ms in forward_ms.items():
        phases = ms and {"forward": ms, "backward": 2 * ms, "step": 3 * ms}
        memory = {"held_memory_mib": 7.0, "peak_memory_mib": 9.0}
        found.append(timed("attention", case, "forward-backward", provider, phases, **memory))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = [*steps("sm", 512, PROVIDERS), *steps("md", 512, {name: 3 * ms for name, ms in PROVIDERS.items()})]
    records += steps("md", 4096, {**PROVIDERS, "plain": None})
    records += [*passes(256, {"plain": 0.4, "flash": 0.2}), *passes(1024, {"plain": None, "flash": 0.3})]
    append(tmp_path, records, PROFILES)
    save_environment(tmp_path, "here", {"device": "cuda", "gpu": "NVIDIA H200"})
    return tmp_path


def test_of_records_of_one_case_the_last_counts_in_the_place_of_the_first(folder: Path) -> None:
    before = load_profiles([folder])
    append(folder, steps("sm", 512, {"plain": 1.0}), PROFILES)
    with (folder / PROFILES).open("a") as file:
        file.write('{"torn')
    after = load_profiles([folder, folder / "nothing"])
    assert [(r.case, r.provider) for r in after] == [(r.case, r.provider) for r in before]
    assert after[2].phases["step"].mean_ms == 1.0
    assert after[:2] == before[:2]
    with (folder / PROFILES).open("a") as file:
        file.write('"}\n')
    assert load_profiles([folder]) == after
    (folder / PROFILES).write_text('{"torn"}\n')
    with pytest.raises(WarploomError, match=rf"{PROFILES}:1: not a profile of this version"):
        load_profiles([folder])


def test_a_profile_is_stale_when_its_kernels_are_others() -> None:
    flash, compiled, plain, _, llama = steps("sm", 512, PROVIDERS)
    assert not any(map(is_stale, (flash, compiled, plain, llama)))
    assert is_stale(replace(flash, fingerprint="other"))


def test_a_profile_is_a_section_of_the_report(folder: Path) -> None:
    model, attention = profile_sections([folder])
    assert (model.operator, model.x, model.emphasis) == ("transformer", "size", "flash+compile")
    assert model.constants == {"batch": 4, "position": "rotate", "dtype": "bfloat16"}
    short, long = model.panels
    assert (short.label, long.label) == ("context_length = 512", "context_length = 4096")
    assert short.xs("train") == ["sm", "md"]
    assert short.speedups("train", "flash+compile", "llama") == {"sm": 3.0, "md": 3.0}
    assert short.at("train")["flash"]["sm"].fraction == pytest.approx(0.25)
    assert short.at("train")[LIMIT]["sm"].ms == pytest.approx(2.0)
    assert long.at("train")["plain"]["md"].badge == "oom"
    assert model.command(long, "train") == (
        "warploom profile transformer --size md --mode train --attention flash,plain,llama --context-length 4096 "
        "--batch 4 --dtype bf16 --compile no,yes"
    )
    (panel,) = attention.panels
    assert (attention.emphasis, panel.modes, panel.xs("bwd")) == ("flash", ["fwd", "bwd"], [256, 1024])
    assert panel.at("bwd")["plain"][256].ms == 0.8
    command = attention.command(panel, "bwd")
    assert command == "warploom profile attention --head-dim 64 --seq-len 256,1024 --attention plain,flash"
    assert (
        main([*command.split()[1:], "--device", "cpu", "--passes", "1", "--batch", "1", "-o", str(folder / "a")])
        == 0
    )


def test_the_report_shows_profiles_alone_and_beside_a_bench(folder: Path) -> None:
    page = write_report([folder], folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    figures = json.loads(found[1])
    assert {name.partition("-")[0] for name in figures} == {"transformer", "attention"}
    time = figures["transformer-0-train-0"]
    assert time["layout"]["xaxis"]["categoryarray"] == ["sm", "md"]
    (plain,) = (trace for trace in time["data"] if trace["name"] == "plain")
    assert plain["y"] == [0.012, 0.036]
    looks = {
        trace["name"]: (trace["line"]["color"], trace["marker"]["symbol"])
        for trace in time["data"]
        if trace["name"] != LIMIT
    }
    assert len(set(looks.values())) == len(looks)
    assert looks["flash"][0] == looks["flash+compile"][0]
    summary = page.partition('<table class="summary">')[2].partition("</table>")[0]
    # Over the plain model, compiled and not, and over the best that is not ours: 6 / 5, 12 / 5.
    assert re.findall(r'data-head="over[^>]*>([^<]*)', summary)[:3] == ["1.20×", "2.40×", "1.20×"]


def test_texts_get_the_tables_that_they_have_marks_for(folder: Path) -> None:
    append(folder, [replace(steps("lg", 512, {"flash": 1.0})[0], fingerprint="of other code")], PROFILES)
    marks = {name: [mark.replace("speeds", name) for mark in (BEGIN, END)] for name in ("steps", "profiles")}
    for name, (begin, end) in marks.items():
        text = folder / f"{name}.md"
        text.write_text(f"before\n{begin}\n{end}\nafter\n")
        update(text, [folder])
    table = (folder / "steps.md").read_text().splitlines()
    assert (
        table[3] == "| model | tokens | flash | flash+compile | plain | plain+compile | llama | best other / ours |"
    )
    assert table[5] == "| sm | 512 | 8.00 | 5.00 | 12.00 | 6.00 | 15.00 | 1.20 |"
    assert table[7] == "| md | 4096 | 8.00 | 5.00 | OOM | 6.00 | 15.00 | 1.20 |"
    assert table[8:] == ["", marks["steps"][1], "after"]
    whole = (folder / "profiles.md").read_text()
    assert whole.count("**transformer  batch 4") == 2
    assert whole.count("**attention  ") == 3
    assert "lg" not in whole
    empty = folder / "empty"
    empty.mkdir()
    update(folder / "steps.md", [empty])
    assert "There are no records of the present code yet." in (folder / "steps.md").read_text()
